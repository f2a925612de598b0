"""Try a chat template on a few messages, in a separate process with limits on time and memory.

A template comes with a model and is a program: it may loop for hours, write a gigabyte or compute 10 ** 10 ** 9.
jinja's sandbox denies files and Python, but does not bound time and memory. A template that renders a few messages
within bounds is used in this process, for thousands of rows.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache

from hybrid_rlhf.core.config import UserError

SECONDS, MEBIBYTES, CHARACTERS = 10, 1024, 1_000_000
_WAIT = 120.0  # seconds of wall-clock time, for a busy machine
_RESULT = "result of the trial: "  # begins the line with the result: a starting Python may print other lines
_log = logging.getLogger(__name__)
# Renders as transformers does (utils/chat_template_utils.py), with jinja2 alone: importing transformers takes seconds.
_SCRIPT = """
import sys
sys.path[:] = [place for place in sys.path if place]  # not the working directory
import json, math, resource, time
task = json.load(sys.stdin)
sys.path[:] = task["path"]
import datetime, jinja2, jinja2.ext, jinja2.sandbox
class Generation(jinja2.ext.Extension):
    tags = {"generation"}
    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)
def refuse(message):
    raise jinja2.TemplateError(message)
def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
def limit(kind, soft, above):
    try:
        most = resource.getrlimit(kind)[1]
        most = above if most == resource.RLIM_INFINITY else min(above, most)
        resource.setrlimit(kind, (min(soft, most), most))
    except (ValueError, OSError):  # a system that knows no such limit
        pass
def limit_time(more):  # seconds of processor time from now on; past the first limit it ends by SIGXCPU
    soft = math.ceil(time.process_time()) + task["seconds"]
    limit(resource.RLIMIT_CPU, soft, soft + more)
def end(result):
    print("\\n" + task["result"] + str(result))
    sys.exit()
environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = tojson
environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
limit(resource.RLIMIT_AS, task["bytes"], task["bytes"])
limit_time(task["seconds"] + 2)  # to compile, where constants are computed
try:
    template = environment.from_string(task["template"])
except MemoryError:
    end("memory")
except Exception:  # not a template: reported when it renders
    end(0)
limit_time(1)
longest = 0
for values in task["renderings"]:
    if longest > task["characters"]:
        break
    try:
        longest = max(longest, len(template.render(**values)))
    except MemoryError:
        end("memory")
    except Exception:  # a template may refuse messages
        pass
end(longest)
"""


@cache
def check_template(template: str, special: tuple[tuple[str, str], ...], renderings: str) -> None:
    """UserError for a template that takes more than SECONDS of processor time or MEBIBYTES of memory, or writes more
    than CHARACTERS, for a few messages. Where the trial fails a warning says so, and it is used untried.

    special: the tokenizer's special tokens by name. renderings: JSON of a list of {messages, tools,
    add_generation_prompt}.
    """
    cases = [{**dict(special), **values} for values in json.loads(renderings)]
    task = {"path": [place for place in sys.path if isinstance(place, str)], "template": template,
            "renderings": cases, "seconds": SECONDS, "bytes": MEBIBYTES << 20, "characters": CHARACTERS,
            "result": _RESULT}
    try:  # -S: no site, whose start-up files take time; the path is that of this process
        trial = subprocess.run([sys.executable or "python3", "-S", "-c", _SCRIPT], input=json.dumps(task),
                               capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_WAIT)
    except subprocess.TimeoutExpired as error:
        raise UserError(_error(f"does not end within {_WAIT:g} seconds")) from error
    except OSError as error:
        _log.warning("the chat template is used untried: no process for its trial (%s)", error.strerror or error)
        return
    _check_result(trial)


def _check_result(process: subprocess.CompletedProcess[str]) -> None:
    """UserError if the trial exceeded a bound."""
    result = next((line.removeprefix(_RESULT) for line in reversed(process.stdout.splitlines())
                   if line.startswith(_RESULT)), "")
    if process.returncode == -signal.SIGXCPU:
        raise UserError(_error(f"takes more than {SECONDS} seconds of processor time"))
    if process.returncode == -signal.SIGKILL:
        raise UserError(_error("was killed (memory or time)"))
    if result == "memory" or (process.returncode and "MemoryError" in process.stderr):
        raise UserError(_error(f"takes more than {MEBIBYTES} MiB of memory"))
    if process.returncode < 0:
        raise UserError(_error(f"ends the process by signal {-process.returncode}"))
    if process.returncode or not result.isdecimal():
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}, no result"])[-1]
        _log.warning("the chat template is used untried: its trial failed (%s)", reason[:300])
    elif int(result) > CHARACTERS:
        raise UserError(_error(f"writes {int(result):,} characters"))


def _error(what: str) -> str:
    return f"the chat template {what} for a few messages of a word each; give a model with another template"


def renderings(conversations: Sequence[Sequence[Mapping]], tools: Sequence[Mapping]) -> str:
    """The JSON for `check_template`: each conversation before and after an answer, the first also with `tools`."""
    cases = [(messages, None) for messages in conversations] + [(conversations[0], tools)]
    return json.dumps([{"messages": messages, "tools": offered, "add_generation_prompt": is_prompt}
                       for messages, offered in cases for is_prompt in (False, True)])
