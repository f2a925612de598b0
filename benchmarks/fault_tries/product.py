"""The product as a user meets it: a command line in a process of its own, what it may answer, and the runs and models
that tries start from."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from harness import ROOT  # noqa: F401 - puts the checkout on the path

from fault_tries.attempt import Broken, expect, limits
from tests.crash.place import WORDS, difference
from tests.factories.tiny import chatml_tokenizer, save_tiny, tiny_scalar_model

MAX_LINE = 1500  # characters of an error that somebody can read
SECONDS = 50.0

PLAIN = ["--model.dtype", "float32", "--data.split", "null", "--data.cache_dir", "cache"]
# six steps, a checkpoint after 2, 4 and 6; paths are relative: every try stands in a folder of its own
SFT = ["--stage", "sft", *PLAIN, "--data.max_length", "48", "--train.per_device_train_batch_size", "6",
       "--train.learning_rate", "1e-3", "--train.logging_steps", "2", "--model.model_name_or_path", "base",
       "--data.sources", "sft.jsonl", "--data.eval_fraction", "0.2", "--train.eval_steps", "4", "--train.max_steps",
       "6", "--train.save_steps", "2", "--output_dir", "run"]
GRPO = ["--stage", "grpo", *PLAIN, "--data.max_prompt_length", "32", "--model.model_name_or_path", "base",
        "--data.sources", "paid.jsonl", "--data.eval_fraction", "0", "--train.per_device_train_batch_size", "2",
        "--ppo.sampling.max_new_tokens", "6", "--ppo.sampling.num_samples", "2", "--train.max_steps", "2",
        "--train.save_steps", "1", "--output_dir", "run"]
JUDGE = """
def judge(prompts, completions, completion_ids, answer, tags, **_):
    return [float((len(c[0]["content"]) + len(p[0]["content"]) + len(i) + len(a) + len(t)) % 7)
            for p, c, i, a, t in zip(prompts, completions, completion_ids, answer, tags, strict=True)]
"""
CALM = "def bad(completions, **_):\n    return [0.0] * len(completions)\n"
PAID = ["--reward.functions", "[pay.py:bad, pay.py:judge]"]


class Ended(NamedTuple):
    """How a command ended: its exit code (minus a signal's number), what it wrote to stdout and to stderr."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Started:
    """A running command: the same as `hybrid-rlhf WORDS`, without the seconds of its imports and of drawing plots."""

    _number = 0

    def __init__(self, words: Sequence[str], prepare: Callable[[], object] | None = None,
                 stdin: bytes | None = None) -> None:
        Started._number += 1
        self.words, self._code = words, None
        self.log = Path.cwd().parent / f"command{Started._number}"
        Path(f"{self.log}.in").write_bytes(stdin or b"")
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(prepare)

    def _run(self, prepare: Callable[[], object] | None) -> None:
        """In the forked process: never returns."""
        code = 1
        atexit._clear()  # what the forked process's parent had to do at its end
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            os.dup2(os.open(f"{self.log}.in", os.O_RDONLY), 0)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{self.log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
            sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]
            if prepare:
                prepare()
            from hybrid_rlhf.cli import main

            code = main(list(self.words))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # nobody reads it any more
                    stream.flush()
            os._exit(code)

    def _wrote(self, stream: str) -> str:
        path = Path(f"{self.log}.{stream}")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    @property
    def err(self) -> str:
        return self._wrote("err")

    def has_ended(self) -> bool:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code is not None

    def wait(self, seconds: float = SECONDS) -> Ended:
        deadline = time.monotonic() + seconds * limits.patience
        while not self.has_ended():
            expect(time.monotonic() < deadline, f"not over after {seconds:g} s: {self.err.strip()[-300:]}")
            time.sleep(0.005)
        print(f"$ {' '.join(self.words)}\n{self.err}[{self._code}]", file=sys.stderr)  # for the try's log
        return Ended(self._code, self._wrote("out"), self.err)


def command(*words: str, prepare: Callable[[], object] | None = None, stdin: bytes | None = None,
            seconds: float = SECONDS) -> Ended:
    return Started(words, prepare, stdin).wait(seconds)


# --- what it may answer ----------------------------------------------------------------------------------------------


def refused(ended: Ended, *words: str) -> str:
    """Exit code 2 and one line that holds the words: that line. Broken for anything else."""
    check_code(ended, 2)
    expect(len(ended.errors) == 1, f"{len(ended.errors)} lines of error, not one")
    line = ended.errors[0]
    for word in words:
        expect(word in line, f"the line does not say {word!r}: {line[:300]}")
    return line


def finished(ended: Ended) -> Ended:
    """Exit code 0 without an error."""
    check_code(ended, 0)
    expect(not ended.errors, f"exit code 0 with {ended.errors[:1]}")
    return ended


def done_or_refused(ended: Ended) -> bool:
    """Whether it was done; refused in one line is as good."""
    (finished if ended.code == 0 else refused)(ended)
    return ended.code == 0


def check_code(ended: Ended, code: int) -> None:
    """The exit code, without a traceback or an error that is too long to read."""
    if "Traceback (most recent call last)" in ended.err + ended.out:
        lines = [line for line in ended.err.splitlines() if line.strip()]
        raise Broken(f"a traceback: {lines[-1][:300] if lines else ''}")
    for line in ended.errors:
        expect(len(line) <= MAX_LINE, f"an error of {len(line)} characters")
    expect(ended.code == code, f"exit code {ended.code}, not {code}: {ended.err.strip()[-300:]}")


# --- folders ---------------------------------------------------------------------------------------------------------


def take(place: Path, *names: str) -> None:
    """Copies of what was prepared, in the try's own folder."""
    for name in names:
        if (place / name).is_dir():
            shutil.copytree(place / name, name, symlinks=True)
        else:
            shutil.copy(place / name, name)


def contents(folder: str | Path, besides: Iterable[str] = ()) -> dict[str, bytes]:
    """The bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and path.relative_to(folder).parts[0] not in besides}


def status_of(folder: str | Path) -> str:
    """The status in run.json, which must be whole."""
    return json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))["status"]


def write_rows(name: str, rows: Iterable[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


# --- what tries start from -------------------------------------------------------------------------------------------


def before_step(act: Callable[[int], object]) -> None:
    """In a command's process: what happens before each step, by its number within the process."""
    from hybrid_rlhf.run import loop

    step, numbers = loop._step, count(1)

    def after_act(*arguments: object) -> object:
        act(next(numbers))
        return step(*arguments)

    loop._step = after_act


def dies_before_step(number: int) -> Callable[[], None]:
    """In a command's process: it ends at once, as SIGKILL would end it."""
    return lambda: before_step(lambda step: os._exit(9) if step == number else None)


def prepare(place: Path) -> None:
    """Fill the place: a tiny model and a scorer, rows, a run that ended, one that was killed, one with rewards."""
    os.chdir(place)
    write_rows("sft.jsonl", [{"prompt": f"say {w} {i}", "completion": w} for i in range(3) for w in WORDS])
    write_rows("paid.jsonl",
               [{"prompt": [{"role": "user", "content": f"say {w}"}], "answer": w, "tags": [w[0], "x"]} for w in WORDS])
    save_tiny("base", attention_dropout=0.1)
    judge = tiny_scalar_model()
    judge.config.pad_token_id = 0
    judge.save_pretrained("scorer")
    chatml_tokenizer().save_pretrained("scorer")
    finished(command(*SFT, seconds=200))  # compiles the kernels where there are none
    shutil.move("run", "straight")
    check_code(command(*SFT, prepare=dies_before_step(6)), 9)
    shutil.move("run", "broken")
    Path("pay.py").write_text(CALM + JUDGE)
    finished(command(*GRPO, *PAID))
    shutil.move("run", "paid")
    shutil.rmtree("cache")


def take_killed(place: Path) -> None:
    """The run that was killed, with all that it needs to go on."""
    take(place, "base", "sft.jsonl", "broken")
    Path("broken").rename("run")


def same_run(place: Path, straight: str = "straight", run: str = "run") -> None:
    """Broken where a finished run is not, bit for bit, the one that nothing happened to."""
    found = difference(Path(run), place / straight)
    expect(found is None, f"ended otherwise than the run that nothing happened to: {found}")
