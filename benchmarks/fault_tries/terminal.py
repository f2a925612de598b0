"""The terminal or the reader of a pipe goes away, and signals of all kinds come."""

from __future__ import annotations

import os
import pty
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect, until
from fault_tries.prepared import SFT, same_run
from fault_tries.product import Started, command, finished, status_of, stopped, take

SLOW = 0.15  # seconds that each step waits, so that a signal comes in its midst


def slowed(then: Callable[[], object] = lambda: None) -> Callable[[], None]:
    """In a command's process: steps that take their time, after `then`."""

    def prepare() -> None:
        from hybrid_rlhf.run import loop

        step = loop._step

        def waits(*given: object) -> object:
            time.sleep(SLOW)
            return step(*given)

        loop._step = waits
        then()

    return prepare


def steps_done() -> int:
    path = Path("run/metrics.jsonl")
    return path.read_text().count("\n") if path.exists() else 0


def begun(then: Callable[[], object] = lambda: None) -> Started:
    started = Started(SFT, slowed(then))
    until(lambda: steps_done() or started.has_ended(), 30, "the first step")
    return started


def goes_on(place: Path) -> None:
    """The same command ends as if nothing had been."""
    expect(status_of("run") == "stopped", f"run.json says {status_of('run')}")
    finished(command(*SFT))
    same_run(place, "straight")


def signalled(numbers: list[int], place: Path) -> None:
    """Signals in the midst of a step: it saves and stops with 130."""
    take(place, "base", "sft.jsonl")
    started = begun()
    for number in numbers:
        os.kill(started.pid, number)
    stopped(started.wait())
    goes_on(place)


def twice(number: int, place: Path) -> None:
    """The second one stops at once, and loses what came after the last checkpoint at most."""
    take(place, "base", "sft.jsonl")
    started = begun()
    os.kill(started.pid, number)
    time.sleep(0.03)
    os.kill(started.pid, number)
    stopped(started.wait(10))
    finished(command(*SFT))
    same_run(place, "straight")


def ignored(place: Path) -> None:
    """As `nohup` starts it."""
    take(place, "base", "sft.jsonl")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    started = begun()
    signal.signal(signal.SIGHUP, before)
    os.kill(started.pid, signal.SIGHUP)
    finished(started.wait())
    same_run(place, "straight")


def unread(numbers: tuple[int, ...], after: int, place: Path) -> None:
    """stdout or stderr is a pipe whose reader leaves after so many bytes (as | head -1 does)."""
    take(place, "base", "sft.jsonl")
    reader, writer = os.pipe()

    def onto_pipe() -> None:
        os.close(reader)
        for number in numbers:
            os.dup2(writer, number)

    started = Started(SFT, slowed(onto_pipe))
    os.close(writer)
    if after:
        os.read(reader, after)
    os.close(reader)
    ended = started.wait()
    expect(ended.code == 0, f"exit code {ended.code}, not 0")
    same_run(place, "straight")


def closed_at_start(numbers: tuple[int, ...], place: Path) -> None:
    """As >&- 2>&- starts it."""
    take(place, "base", "sft.jsonl")
    ended = command(*SFT, prepare=lambda: [os.close(number) for number in numbers])
    expect(ended.code == 0, f"exit code {ended.code}, not 0")
    same_run(place, "straight")


def full_log(place: Path) -> None:
    """stdout and stderr are on a full disk."""
    take(place, "base", "sft.jsonl")
    ended = command(*SFT, prepare=lambda: [os.dup2(os.open("/dev/full", os.O_WRONLY), n) for n in (1, 2)])
    expect(ended.code == 0, f"exit code {ended.code}, not 0")
    same_run(place, "straight")


def hung_up(steps: int, place: Path) -> None:
    """A pseudo-terminal whose other end is closed after so many steps."""
    take(place, "base", "sft.jsonl")
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = 1
        try:
            slowed()()
            from hybrid_rlhf.cli import main

            code = main(SFT)
        finally:
            os._exit(code)
    os.set_blocking(terminal, False)
    until(lambda: _drained(terminal) and steps_done() >= steps, 30, f"step {steps}")
    os.close(terminal)
    code: list[int] = []

    def has_ended() -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code.append(os.waitstatus_to_exitcode(status))
        return bool(ended)

    until(has_ended, 30, "its end")
    expect(code == [130], f"exit code {code[0]}, not 130")
    goes_on(place)


def _drained(terminal: int) -> bool:
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        pass
    return True


TERMINAL = Group(
    "a terminal that is gone, and signals",
    "signals and a closed terminal: 130, and the same command ends in the same bits as without. "
    "Output that nobody reads, and nohup: the run ends with 0 in the same bits",
    [
        Try(name, partial(signalled, numbers))
        for name, numbers in {
            "SIGHUP": [1],
            "SIGINT": [2],
            "SIGTERM": [15],
            "SIGHUP and SIGHUP at once": [1, 1],
            "SIGTERM and SIGINT at once": [15, 2],
        }.items()
    ]
    + [Try(f"{signal.Signals(number).name} twice", partial(twice, number)) for number in (2, 15)]
    + [Try("SIGHUP under nohup", ignored)]
    + [
        Try(f"{name} to a reader that leaves after {after} bytes", partial(unread, numbers, after))
        for name, numbers in {"stdout": (1,), "stderr": (2,), "both": (1, 2)}.items()
        for after in (0, 1, 500)
    ]
    + [
        Try(f"{name} closed before the start", partial(closed_at_start, numbers))
        for name, numbers in {"stdout": (1,), "stderr": (2,), "all three": (0, 1, 2)}.items()
    ]
    + [Try("a log on a full disk", full_log)]
    + [Try(f"a terminal that is closed after step {steps}", partial(hung_up, steps)) for steps in (1, 3)],
)
