"""How a try is made: in a process of its own, forked from one that has imported everything, with limits of time and of
memory; what it leaves running counts against it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

_PAUSE, _LEAVE_SECONDS = 0.02, 3.0  # between two looks; for what a try has started to end after it
limits = SimpleNamespace(patience=1.0)  # by which all limits of time are multiplied, on a busy machine
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans of a try become its supervisor's children


class Broken(Exception):
    """A try was not survived; the message says how."""


class Try(NamedTuple):
    """One fault. act(place) runs in an empty folder and raises where the product did not survive; place has what
    `prepared.py` made. seconds: of wall time. mebibytes: by which no process of the try may grow beyond the one that it
    was forked from. is_alone: nothing else runs beside it."""

    name: str
    act: Callable[[Path], object]
    seconds: float = 60.0
    mebibytes: int = 1536
    is_alone: bool = False


class Group(NamedTuple):
    """A row of the page: what is attacked, the tries, and what "survived" means for each of them."""

    title: str
    survived_means: str
    tries: list[Try]


def expect(is_so: object, said: str) -> None:
    if not is_so:
        raise Broken(said)


def until(is_so: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something to come true; Broken after so many seconds."""
    deadline = time.monotonic() + seconds * limits.patience
    while not is_so():
        expect(time.monotonic() < deadline, f"{what} not within {seconds:g} s")
        time.sleep(_PAUSE)


# --- tries, in turns -------------------------------------------------------------------------------------------------


def outcomes(tries: Sequence[Try], place: Path, scratch: Path, jobs: int,
             end: float = float("inf")) -> Iterator[tuple[Try, dict]]:
    """Each try with {"said": "" where it was survived, "seconds", "log"}, as they end; `jobs` at once. None is begun
    after `end`, of the monotonic clock."""
    waiting, running = list(enumerate(tries)), {}
    while waiting or running:
        if time.monotonic() > end:
            waiting = []
        while waiting and len(running) < jobs and _may_share(waiting[0][1], [each for each, _ in running.values()]):
            number, attempt = waiting.pop(0)
            folder = scratch / str(number)
            folder.mkdir()
            sys.stdout.flush(), sys.stderr.flush()
            if not (pid := os.fork()):
                _never_returning(_supervise, attempt, place, folder)
            running[pid] = attempt, folder
        if not running:
            return
        pid, _ = os.wait()
        if pid not in running:
            continue
        attempt, folder = running.pop(pid)
        answer = folder / "answer.json"
        yield attempt, (json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else
                        {"said": "its supervisor has died", "seconds": 0.0, "log": ""})
        shutil.rmtree(folder, ignore_errors=True)


def _may_share(one: Try, others: list[Try]) -> bool:
    return not others or not any(each.is_alone for each in (one, *others))


def _never_returning(act: Callable[..., None], *given: object) -> None:
    """The end of a forked process, whatever happens: nothing of its parent's is cleaned up by it."""
    try:
        act(*given)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(0)


def _supervise(attempt: Try, place: Path, folder: Path) -> None:
    """In a forked process: run the try in another one, and write what became of it."""
    os.setsid()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    began, log, answer = time.monotonic(), folder / "log", folder / "answer.json"
    may_begin, begin = os.pipe()
    if not (worker := os.fork()):
        os.close(begin)
        os.read(may_begin, 1)
        _never_returning(_work, attempt, place, folder)
    at_first = resident(worker)  # before its first line: what it takes at once counts as well
    os.write(begin, b"!")
    said = _watch(worker, attempt, began, at_first)
    if not said:
        told = folder / "said"
        said = told.read_text(encoding="utf-8") if told.exists() else "its process has died"
    seconds = time.monotonic() - began
    left = _end_descendants()
    if left and not said:
        said = f"left running: {', '.join(left)}"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    answer.write_text(json.dumps({"said": said, "seconds": round(seconds, 1), "log": text[-4000:]}), encoding="utf-8")


def _work(attempt: Try, place: Path, folder: Path) -> None:
    """In the try's own process."""
    said = ""
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0), os.dup2(log, 1), os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # this may run under nohup
        (folder / "own").mkdir()
        os.chdir(folder / "own")
        os.environ.setdefault("HYBRID_RLHF_CACHE", os.path.expanduser("~/.cache/hybrid_rlhf"))  # compiled kernels
        os.environ["HOME"] = str(folder / "own")
        attempt.act(place)
    except Broken as error:
        said = str(error)
    except BaseException as error:
        traceback.print_exc()
        said = f"the try itself failed: {type(error).__name__}: {error}"
    (folder / "said").write_text(said.replace("\n", " ")[:600], encoding="utf-8", errors="backslashreplace")


def _watch(worker: int, attempt: Try, began: float, at_first: int) -> str:
    """Wait for the try; why it was ended before its time, or "". `at_first`: what it had resident, in bytes."""
    while True:
        ended, _ = os.waitpid(worker, os.WNOHANG)
        if ended:
            return ""
        said = ""
        if time.monotonic() - began > attempt.seconds * limits.patience:
            said = f"not over after {attempt.seconds:g} s"
        grown = max((resident(pid) for pid in (worker, *descendants(worker))), default=0) - at_first
        if grown > attempt.mebibytes << 20:
            said = f"took {grown >> 20} MiB, more than {attempt.mebibytes}"
        if said:
            for pid in (worker, *descendants(worker)):
                _kill(pid)
            os.waitpid(worker, 0)
            return said
        time.sleep(_PAUSE)


def _end_descendants() -> list[str]:
    """End what has outlived the try; the names of what needed to be killed."""
    deadline, left = time.monotonic() + _LEAVE_SECONDS * limits.patience, []
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return left
        if time.monotonic() > deadline:
            for pid in descendants(os.getpid()):
                left.append(_name(pid))
                _kill(pid)
        time.sleep(_PAUSE)


def descendants(pid: int) -> list[int]:
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    except OSError:  # it has ended meanwhile
        pass
    return [each for child in found for each in (child, *descendants(child))]


def resident(pid: int) -> int:
    """Bytes; 0 for a process that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:80]
    except OSError:
        return str(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
