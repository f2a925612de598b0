"""Ctrl-C and SIGTERM: the first asks for an end in good order, the second ends at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybrid_rlhf.core.distributed import world_size

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ECHO_SECONDS = 1.0  # within these a launcher passes on what the terminal has sent to every process already


@contextmanager
def interruptible(announce: Callable[[str], None]) -> Iterator[list[int]]:
    """A list that is empty until the first SIGINT or SIGTERM; the second raises KeyboardInterrupt.

    One of several processes takes what comes within a second of the first for the same.
    """
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield seen
        return
    first = 0.0

    def handle(number: int, _frame: object) -> None:
        nonlocal first
        if seen and (world_size() == 1 or time.monotonic() - first > _ECHO_SECONDS):
            raise KeyboardInterrupt
        if not seen:
            first = time.monotonic()
            seen.append(number)
            announce("finishing this step, then saving a checkpoint; once more stops at once")

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stops_as_by_hand() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
