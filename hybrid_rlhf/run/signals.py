"""Handle Ctrl-C, SIGTERM and SIGHUP: the first asks for a graceful stop, the second stops at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hybrid_rlhf.core.distributed import world_size

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within these a launcher forwards a signal that the terminal has sent to every process already, and a process manager
# sends several kinds of signals.
_ECHO_SECONDS = 1.0


@contextmanager
def interruptible(announce: Callable[[], None]) -> Iterator[list[int]]:
    """A list that is empty until the first SIGINT, SIGTERM or SIGHUP; the second raises KeyboardInterrupt.

    Signals within a second of the first count as the same: for one of several processes all, for a single process those
    of another kind. SIGHUP stays ignored where it was (nohup). One of several processes that fails ignores SIGTERM.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield seen
        return
    first = 0.0

    def handle(number: int, _frame: object) -> None:
        nonlocal first
        is_echo = time.monotonic() - first <= _ECHO_SECONDS and (world_size() > 1 or number not in seen)
        if seen and not is_echo:
            raise KeyboardInterrupt
        seen.append(number)
        if len(seen) == 1:
            first = time.monotonic()
            announce()

    with _handled(SIGNALS, handle):
        try:
            yield seen
        except Exception:
            if world_size() > 1:  # after a failure the launcher ends the others; this one still has to print its error
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise


@contextmanager
def stops_as_by_hand() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGTERM and SIGHUP within the block, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM, signal.SIGHUP), handle):
        yield


@contextmanager
def _handled(numbers: Sequence[int], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Install `handle` for the signals `numbers` within the block, except SIGHUP where it is ignored.

    When a terminal closes, both its shell and the system send SIGHUP: after the first it is ignored.
    """
    def heard(number: int, frame: object) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        handle(number, frame)

    before = {number: signal.signal(number, heard) for number in numbers
              if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is heard:
                signal.signal(number, handler)
