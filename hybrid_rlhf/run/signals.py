"""Ctrl-C, SIGTERM and the end of the terminal: the first asks for an end in good order, the second ends at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hybrid_rlhf.core.distributed import world_size

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Within these a launcher passes on what the terminal has sent to every process already, and who ends processes sends
# signals of several kinds.
_ECHO_SECONDS = 1.0


@contextmanager
def interruptible(announce: Callable[[], None]) -> Iterator[list[int]]:
    """A list that is empty until the first SIGINT, SIGTERM or SIGHUP; the second raises KeyboardInterrupt.

    What comes within a second of the first is the same to one of several processes, and so is one of another kind to a
    process alone. SIGHUP stays ignored where it was (nohup). One of several that fails ignores SIGTERM from then on.
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
            if world_size() > 1:  # the launcher of one that has died ends the others, which have a line to say first
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise


@contextmanager
def stops_as_by_hand() -> Iterator[None]:
    """Within the block SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with _handled((signal.SIGTERM, signal.SIGHUP), handle):
        yield


@contextmanager
def _handled(numbers: Sequence[int], handle: Callable[[int, object], None]) -> Iterator[None]:
    """Within the block the signals `numbers` call `handle`, but SIGHUP where it is ignored.

    A terminal is gone only once, but its shell and the system both say so: after the first SIGHUP it is ignored.
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
