"""The terminal or the reader of a pipe goes away, and signals of all kinds come."""

from __future__ import annotations

import os
import pty
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from fault_tries.attempt import Group, Try, expect, until
from fault_tries.prepared import SFT, before_step, same_run
from fault_tries.product import Ended, Started, command, finished, status_of, stopped, take

SLOW = 0.15  # seconds that each step waits, so that a signal comes in its midst


def slowed() -> None:
    """In a command's process: steps that take their time."""
    before_step(lambda _number: time.sleep(SLOW))


def steps_done() -> int:
    path = Path("run/metrics.jsonl")
    return path.read_text().count("\n") if path.exists() else 0


def begun() -> Started:
    started = Started(SFT, slowed)
    until(lambda: steps_done() or started.has_ended(), 30, "the first step")
    return started


def goes_on(place: Path) -> None:
    """The same command ends as if nothing had been."""
    expect(status_of("run") == "stopped", f"run.json says {status_of('run')}")
    finished(command(*SFT))
    same_run(place)


def runs_to_its_end(ended: Ended, place: Path) -> None:
    expect(ended.code == 0, f"exit code {ended.code}, not 0")
    same_run(place)


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
    same_run(place)


def ignored(place: Path) -> None:
    """As `nohup` starts it."""
    take(place, "base", "sft.jsonl")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    started = begun()
    signal.signal(signal.SIGHUP, before)
    os.kill(started.pid, signal.SIGHUP)
    finished(started.wait())
    same_run(place)


def unread(numbers: tuple[int, ...], after: int, place: Path) -> None:
    """stdout or stderr is a pipe whose reader leaves after so many bytes (as | head -1 does)."""
    take(place, "base", "sft.jsonl")
    reader, writer = os.pipe()

    def onto_pipe() -> None:
        slowed()
        os.close(reader)
        for number in numbers:
            os.dup2(writer, number)

    started = Started(SFT, onto_pipe)
    os.close(writer)
    if after:
        os.read(reader, after)
    os.close(reader)
    runs_to_its_end(started.wait(), place)


def closed_at_start(numbers: tuple[int, ...], place: Path) -> None:
    """As >&- 2>&- starts it."""
    take(place, "base", "sft.jsonl")
    runs_to_its_end(command(*SFT, prepare=lambda: [os.close(number) for number in numbers]), place)


def full_log(place: Path) -> None:
    """stdout and stderr are on a full disk."""
    take(place, "base", "sft.jsonl")
    ended = command(*SFT, prepare=lambda: [os.dup2(os.open("/dev/full", os.O_WRONLY), n) for n in (1, 2)])
    runs_to_its_end(ended, place)


def hung_up(steps: int, place: Path) -> None:
    """A pseudo-terminal whose other end is closed after so many steps."""
    take(place, "base", "sft.jsonl")
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = 1
        try:
            slowed()
            from hybrid_rlhf.cli import main

            code = main(SFT)
        finally:
            os._exit(code)
    os.set_blocking(terminal, False)
    until(lambda: _drained(terminal) and steps_done() >= steps, 30, f"step {steps}")
    os.close(terminal)
    ended = (0, 0)

    def has_ended() -> int:
        nonlocal ended
        ended = os.waitpid(pid, os.WNOHANG)
        return ended[0]

    until(has_ended, 30, "its end")
    code = os.waitstatus_to_exitcode(ended[1])
    expect(code == 130, f"exit code {code}, not 130")
    goes_on(place)


def _drained(terminal: int) -> bool:
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass
    return True


TERMINAL = Group(
    "a terminal that is gone, and signals",
    "signals and a closed terminal: 130, and the same command ends in the same bits as without. "
    "Output that nobody reads, and nohup: the run ends with 0 in the same bits",
    [Try(" and ".join(signal.Signals(n).name for n in numbers) + " at once" * (len(numbers) > 1),
         partial(signalled, numbers)) for numbers in ([1], [2], [15], [1, 1], [15, 2])]
    + [Try(f"{signal.Signals(number).name} twice", partial(twice, number)) for number in (2, 15)]
    + [Try("SIGHUP under nohup", ignored)]
    + [Try(f"{name} to a reader that leaves after {after} bytes", partial(unread, numbers, after))
       for name, numbers in {"stdout": (1,), "stderr": (2,), "both": (1, 2)}.items() for after in (0, 1, 500)]
    + [Try(f"{name} closed before the start", partial(closed_at_start, numbers))
       for name, numbers in {"stdout": (1,), "stderr": (2,), "all three": (0, 1, 2)}.items()]
    + [Try("a log on a full disk", full_log)]
    + [Try(f"a terminal that is closed after step {steps}", partial(hung_up, steps)) for steps in (1, 3)])
