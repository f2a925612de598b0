"""Reward functions that do what they should not: to their inputs, to the clock, to the process around them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect
from fault_tries.prepared import GRPO, JUDGE, PAID, same_run
from fault_tries.product import command, finished, refused, status_of, take

SIGNATURE = "def bad(prompts, completions, completion_ids, answer, tags, **rest):\n"
CALM = "return [0.0] * len(completions)"

# what a function does before it pays nothing
CHANGES = {
    "reverses all lists": "for each in (prompts, completions, completion_ids, answer, tags): each.reverse()",
    "empties all lists": "n = len(completions)\nfor each in (prompts, completions, completion_ids, answer, tags): "
    "each.clear()\nreturn [0.0] * n",
    "rewrites messages": "prompts[0][0]['content'] = completions[0][0]['content'] = 'x'",
    "adds messages": "completions[0].insert(0, {'role': 'user', 'content': 'abc'})",
    "lengthens ids": "completion_ids[0] += [5] * 100",
    "changes a column": "answer[:] = ['longer than it was'] * len(answer)",
    "changes what a column holds": "for each in tags: each.append('more')",
    "deletes keys of messages": "prompts[0][0].clear(); completions[0][0].clear()",
    "clears its keywords": "rest.clear()",
}
SURROUNDINGS = {
    "torch's default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "torch's default device": "import torch; torch.set_default_device('meta')",
    "grad mode off": "import torch; torch.set_grad_enabled(False)",
    "inference mode left open": "import torch; torch.inference_mode().__enter__()",
    "deterministic algorithms": "import torch; torch.use_deterministic_algorithms(True)",
    "threads": "import torch; torch.set_num_threads(3)",
    "matmul precision": "import torch; torch.set_float32_matmul_precision('medium')",
    "the working directory": "import os; os.mkdir('elsewhere') if not os.path.exists('elsewhere') else 0; "
    "os.chdir('elsewhere')",
    "forks; the child comes back": "import os; pid = os.fork(); os.waitpid(pid, 0) if pid else None",
    "forks; the child leaves": "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)",
    "forks; the child raises": "import os\npid = os.fork()\nif not pid: raise KeyError('child')\nos.waitpid(pid, 0)",
    "prints a megabyte": "print('x' * 2**20)",
    "numpy raises": "import numpy; numpy.seterr(all='raise')",
    "the collector off": "import gc; gc.disable()",
    "the environment cleared": "import os; os.environ.clear()",
}
UNSAYABLE = "class E(Exception):\n    def __str__(self): raise RuntimeError('no')\n    __repr__ = __str__\n"
ANSWERS = {
    "10**400": "return [10**400] * len(completions)",
    "10**5000": "return [10**5000] * len(completions)",
    "nan": "return [float('nan')] * len(completions)",
    "-inf": "return [float('-inf')] * len(completions)",
    "strings": "return ['1.0'] * len(completions)",
    "a string": "return '1.0'",
    "None": "return None",
    "a number": "return 1.0",
    "a dictionary": "return {i: 1.0 for i, _ in enumerate(completions)}",
    "too few": "return [0.0]",
    "too many": "return [0.0] * 1000",
    "bytes": "return [b'1'] * len(completions)",
    "a complex number": "return [1j] * len(completions)",
    "nested": "return [[0.0]] * len(completions)",
    "objects": "return [object()] * len(completions)",
    "a number that cannot be shown": "class N:\n    def __repr__(self): raise RuntimeError('no')\n"
    "return [N()] * len(completions)",
    "a float of its own that raises": "class F(float):\n    def __float__(self): raise RuntimeError('no')\n"
    "    def __repr__(self): return 'F'\nreturn [F(1)] * len(completions)",
    "a generator that raises": "return (1 / 0 for _ in completions)",
    "raises KeyError": "raise KeyError('no such answer')",
    "raises without words": "raise ValueError",
    "raises what cannot be shown": f"{UNSAYABLE}raise E",
    "raises GeneratorExit": "raise GeneratorExit",
    "raises StopIteration": "raise StopIteration",
    "raises SystemExit(0)": "raise SystemExit(0)",
    "raises MemoryError": "raise MemoryError",
    "recursion": "return bad(prompts, completions, completion_ids, answer, tags)",
    "a message of a megabyte": "raise ValueError('x' * 2**20)",
    "a message of many lines": "raise ValueError('a\\nTraceback of mine\\nerror: b\\n')",
    "a message that drives the terminal": "raise ValueError('\\x1b[2J\\u202e')",
    "an exception of a lone surrogate": "raise ValueError('\\ud800')",
    "a BaseException of its own": "class B(BaseException): pass\nraise B('x')",
    "an exception group": "raise ExceptionGroup('a', [ValueError('b'), KeyError('c')])",
    "an await that fails": "import asyncio\nasync def a(): raise KeyError('x')\nreturn asyncio.run(a())",
}
CRASHES = {"os._exit(7)": "import os; os._exit(7)", "os._exit(0)": "import os; os._exit(0)",
           "SIGSEGV": "import os; os.kill(os.getpid(), 11)", "SIGKILL": "import os; os.kill(os.getpid(), 9)",
           "closes every descriptor": "import os; os.closerange(0, 4096)"}
SWALLOWS = {
    "except Exception": "import time\nwhile True:\n    try: time.sleep(0.01)\n    except Exception: pass",
    "except BaseException": "import time\nwhile True:\n    try: time.sleep(0.01)\n    except BaseException: pass",
    "bare except around a long sleep": "import time\nwhile True:\n    try: time.sleep(60)\n    except: continue",
    "finally that begins again": "import time\ndef again():\n    try: time.sleep(60)\n    finally: again()\nagain()",
    "suppress": "import contextlib, time\nwhile True:\n    with contextlib.suppress(BaseException): time.sleep(0.05)",
    "a busy loop": "while True: pass",
    "a busy loop that catches": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "a regular expression": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "a lock": "import threading\nlock = threading.Lock(); lock.acquire(); lock.acquire()",
    "a thread that is waited for": "import threading, time\nt = threading.Thread(target=time.sleep, args=(60,), "
    "daemon=True); t.start(); t.join()",
    "an await that catches": "import asyncio\nasync def a():\n    while True:\n        try: await asyncio.sleep(9)\n"
    "        except BaseException: pass\nasyncio.run(a())",
    "the timer switched off": "import signal, time; signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(1)",
    "SIGALRM ignored": "import signal, time; signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(1)",
    "SIGALRM blocked": "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); time.sleep(1)",
}
COMPILED = {  # the guide says that only a process of its own ends these
    "compiled code": "sum(range(10**11))",
    "a handler of its own for ever": (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *_: None)\nwhile True:\n    try: time.sleep(1)\n"
        "    except BaseException: pass"),
    "a child that it waits for": "import subprocess; subprocess.run(['sleep', '40'])",
}


def run(body: str, isolate: bool, timeout: float = 10.0):  # noqa: ANN201
    """A GRPO run of two steps that a function with this body pays beside an honest one."""
    text = SIGNATURE + textwrap.indent(f"{body}\n{CALM}\n", "    ")
    Path("pay.py").write_text(text + JUDGE, encoding="utf-8", errors="surrogateescape")
    return command(*GRPO, *PAID, "--reward.timeout", str(timeout), "--reward.isolate", str(isolate).lower())


def ends(body: str, isolate: bool, place: Path) -> None:
    take(place, "base", "paid.jsonl")
    finished(run(body, isolate))


def changes_nothing(body: str, isolate: bool, place: Path) -> None:
    ends(body, isolate, place)
    same_run(place, "paid")


def is_refused(body: str, isolate: bool, place: Path, said: str = "", timeout: float = 10.0) -> None:
    take(place, "base", "paid.jsonl")
    refused(run(body, isolate, timeout), "reward source bad", said)
    expect(status_of("run") == "failed", f"run.json says {status_of('run')}")
    expect(not Path("run/model").exists(), "a model was exported")


def tries_of(act: Callable, rows: dict, ways: Iterable[bool] = (False, True), **named: object) -> list[Try]:
    return [Try(f"{name}{', isolated' * isolate}", partial(act, body, isolate, **named))
            for name, body in rows.items() for isolate in ways]


def third(rows: dict) -> dict:
    return dict(list(rows.items())[::3])


INPUTS = Group("reward functions that change their inputs",
               "the run ends in the same bits as beside a function that changes nothing",
               tries_of(changes_nothing, CHANGES))
TIMEOUT = Group(
    "reward.timeout and functions that swallow what ends them",
    'exit code 2 within the limit, one line with "no answer within"; run.json says failed; no process is left',
    tries_of(is_refused, SWALLOWS, said="no answer within 0.3 s", timeout=0.3)
    + tries_of(is_refused, COMPILED, [True], said="no answer within 0.3 s", timeout=0.3))
DRAWS = "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0); torch.rand(3)"
EFFECTS = Group("reward functions that change the process, and what they answer or raise",
                "changed: the same bits as beside a function that changes nothing. Answered or raised: exit code 2, "
                "one line with the source; run.json says failed",
                tries_of(changes_nothing, SURROUNDINGS, [False])
                + tries_of(changes_nothing, third(SURROUNDINGS), [True])
                + tries_of(ends, {"seeds and draws": DRAWS})
                + tries_of(is_refused, ANSWERS, [False])
                + tries_of(is_refused, third(ANSWERS), [True])
                + tries_of(is_refused, CRASHES, [True]))
