"""The product as a user meets it: a command line in a process of its own, and what it may answer."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fault_tries.attempt import Broken, expect, limits

MAX_LINE = 1500  # characters of an error that somebody can read
SECONDS = 50.0


class Ended(NamedTuple):
    """How a command ended: its exit code (minus a signal's number), what it wrote to stdout and to stderr."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error: ")]


class Started:
    """A command that runs: the same as `hybrid-rlhf WORDS`, without the seconds of its imports, and as where matplotlib
    is not installed unless `draws`: plots are half of a tiny run's time."""

    draws, _number = False, 0

    def __init__(self, words: Sequence[str], prepare: Callable[[], object] | None = None,
                 stdin: bytes | None = None) -> None:
        Started._number += 1
        self.words, self._code = words, None
        self.log = Path.cwd().parent / f"command{Started._number}"
        if stdin is not None:
            Path(f"{self.log}.in").write_bytes(stdin)
        sys.stdout.flush(), sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            self._run(prepare, stdin is not None)

    def _run(self, prepare: Callable[[], object] | None, has_stdin: bool) -> None:
        """In the forked process: never returns."""
        code = 1
        atexit._clear()  # what the forked process's parent had to do at its end
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{self.log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
            if has_stdin:
                os.dup2(os.open(f"{self.log}.in", os.O_RDONLY), 0)
                sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            if not Started.draws:
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

    @property
    def err(self) -> str:
        path = Path(f"{self.log}.err")
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

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
        found = Path(f"{self.log}.out")
        out = found.read_text(encoding="utf-8", errors="replace") if found.exists() else ""
        print(f"$ {' '.join(self.words)}\n{self.err}[{self._code}]", file=sys.stderr)  # for the try's log
        return Ended(self._code, out, self.err)


def command(*words: str, prepare: Callable[[], object] | None = None, stdin: bytes | None = None,
            seconds: float = SECONDS) -> Ended:
    return Started(words, prepare, stdin).wait(seconds)


# --- what it may answer ----------------------------------------------------------------------------------------------


def refused(ended: Ended, *words: str) -> str:
    """Exit code 2 and one line that holds the words: that line. Broken for anything else."""
    _in_order(ended)
    expect(ended.code == 2, f"exit code {ended.code}, not 2: {ended.err.strip()[-300:]}")
    expect(len(ended.errors) == 1, f"{len(ended.errors)} lines of error, not one")
    line = ended.errors[0]
    for word in words:
        expect(word in line, f"the line does not say {word!r}: {line[:300]}")
    return line


def finished(ended: Ended) -> Ended:
    """Exit code 0 without an error."""
    _in_order(ended)
    expect(ended.code == 0, f"exit code {ended.code}, not 0: {ended.err.strip()[-300:]}")
    expect(not ended.errors, f"exit code 0 with {ended.errors[:1]}")
    return ended


def done_or_refused(ended: Ended) -> bool:
    """Whether it was done; refused in one line is as good."""
    if ended.code == 0:
        finished(ended)
        return True
    refused(ended)
    return False


def stopped(ended: Ended) -> None:
    """Exit code 130: stopped by the user, with a checkpoint."""
    _in_order(ended)
    expect(ended.code == 130, f"exit code {ended.code}, not 130: {ended.err.strip()[-300:]}")


def _in_order(ended: Ended) -> None:
    if "Traceback (most recent call last)" in ended.err + ended.out:
        lines = [line for line in ended.err.splitlines() if line.strip()]
        raise Broken(f"a traceback: {lines[-1][:300] if lines else ''}")
    for line in ended.errors:
        expect(len(line) <= MAX_LINE, f"an error of {len(line)} characters")


# --- folders ---------------------------------------------------------------------------------------------------------


def take(place: Path, *names: str) -> None:
    """Copies of what was prepared, in the try's own folder."""
    for name in names:
        if (place / name).is_dir():
            shutil.copytree(place / name, name, symlinks=True)
        else:
            shutil.copy(place / name, name)


def contents(folder: str | Path, besides: Iterable[str] = ()) -> dict[str, bytes | str]:
    """Every path below a folder: a file's bytes, where a link leads, "" for a folder."""
    found: dict[str, bytes | str] = {}
    for path in sorted(Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if name.split("/")[0] in besides:
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = path.read_bytes() if path.is_file() else ""
    return found


def status_of(folder: str | Path) -> str:
    """The status in run.json, which must be whole."""
    return json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))["status"]


def write_rows(name: str, rows: Iterable[dict]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
