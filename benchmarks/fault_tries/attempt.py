"""A try is one fault, made in a process forked from one that has imported everything. It has a limit of time, and a
process that it leaves running counts against it."""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil

_PAUSE, _LEAVE_SECONDS = 0.02, 3.0  # between two looks; that a try's processes have to end after it
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans of a try become its own children
limits = SimpleNamespace(patience=1.0)  # by which all limits of time are multiplied, on a busy machine


class Broken(Exception):
    """A try was not survived; the message says how."""


class Try(NamedTuple):
    """act(place) runs in an empty folder and raises where the product did not survive; `place` holds what
    `product.prepare` made. seconds: its limit of wall time."""

    name: str
    act: Callable[[Path], object]
    seconds: float = 90.0


class Group(NamedTuple):
    """A row of the page: what is attacked, the tries, and what "survived" means for each of them."""

    title: str
    survived_means: str
    tries: list[Try]


def expect(is_so: object, message: str) -> None:
    if not is_so:
        raise Broken(message)


def until(is_so: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for something to come true; Broken after so many seconds."""
    deadline = time.monotonic() + seconds * limits.patience
    while not is_so():
        expect(time.monotonic() < deadline, f"{what} not within {seconds:g} s")
        time.sleep(_PAUSE)


def outcomes(tries: Sequence[Try], place: Path, scratch: Path, jobs: int,
             end: float = float("inf")) -> Iterator[tuple[Try, dict]]:
    """Yield each try as it ends, with {"fault": "" where it was survived, "log"}; `jobs` run at once, and none begins
    after `end` of the monotonic clock."""
    waiting, running = list(enumerate(tries)), {}
    while True:
        while waiting and len(running) < jobs and time.monotonic() < end:
            number, attempt = waiting.pop(0)
            folder = scratch / str(number)
            folder.mkdir()
            sys.stdout.flush(), sys.stderr.flush()
            if not (pid := os.fork()):
                _make(attempt, place, folder)
            running[pid] = attempt, folder
        if not running:
            return
        pid, _ = os.wait()
        if pid in running:
            attempt, folder = running.pop(pid)
            answer = folder / "answer.json"
            yield attempt, (json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else
                            {"fault": "its process has died", "log": ""})
            shutil.rmtree(folder, ignore_errors=True)


def _make(attempt: Try, place: Path, folder: Path) -> None:
    """Make the try in this forked process and write down what became of it; never returns."""
    fault = ""
    try:
        _stand_alone(folder)
        signal.signal(signal.SIGALRM, _raises(f"not over after {attempt.seconds:g} s"))
        signal.alarm(math.ceil(attempt.seconds * limits.patience))
        try:
            attempt.act(place)
        except Broken as error:
            fault = str(error)
        except BaseException as error:
            traceback.print_exc()
            fault = f"the try itself failed: {type(error).__name__}: {error}"
        signal.alarm(0)
        if (left := _end_children()) and not fault:
            fault = f"left running: {', '.join(left)}"
        sys.stdout.flush(), sys.stderr.flush()
        log = (folder / "log").read_text(encoding="utf-8", errors="replace")[-4000:]
        fault = fault.replace("\n", " ")[:600].encode("utf-8", "backslashreplace").decode()
        (folder / "answer.json").write_text(json.dumps({"fault": fault, "log": log}), encoding="utf-8")
    finally:
        os._exit(0)  # nothing of its parent's is cleaned up here


def _raises(message: str) -> Callable[..., None]:
    """A signal handler that raises Broken."""
    def handle(*_frame: object) -> None:
        raise Broken(message)

    return handle


def _stand_alone(folder: Path) -> None:
    """A session, a log, a home and a working folder of the try's own, and default signals."""
    os.setsid()
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(log, 1), os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    (folder / "own").mkdir()
    os.chdir(folder / "own")
    os.environ.setdefault("HYBRID_RLHF_CACHE", os.path.expanduser("~/.cache/hybrid_rlhf"))  # compiled kernels
    os.environ["HOME"] = str(folder / "own")


def _end_children() -> list[str]:
    """Wait for what has outlived the try, then kill it; the command lines of what was killed."""
    deadline, killed = time.monotonic() + _LEAVE_SECONDS * limits.patience, []
    while True:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process().children(recursive=True) if time.monotonic() > deadline else ():
                killed.append(" ".join(process.cmdline())[:80])
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return killed
        time.sleep(_PAUSE)
