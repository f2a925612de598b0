"""What this process is doing now, as text: long phases set it, the progress of a run shows it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")

_listeners: list[Callable[[str], None]] = []
_now = "starting"
_parts = (0, 0)
SLOW = 2.0  # seconds after which a phase is named


def doing(text: str, done: int = 0, count: int = 0) -> None:
    """Set what begins now ("sampling", "epoch 2 of 4"); "" at its end. done: how many of the `count` parts of a step's
    training are done. Costs nothing without listeners."""
    global _now, _parts
    _now, _parts = text, (done, count)
    for listener in _listeners:
        listener(text)


def now() -> str:
    """The text that was set last; "starting" before that."""
    return _now


def parts_done() -> tuple[int, int]:
    """How many parts of a step's training are done, and how many there are; 0 of 0 outside of it."""
    return _parts


def parts(what: str, items: Iterable[Item], count: int) -> Iterator[Item]:
    """`items`, the `count` parts of a step's training, each announced as it begins: "`what` 1 of 4"."""
    for number, item in enumerate(items):
        doing(f"{what} {number + 1} of {count}", number, count)
        yield item


def epochs(count: int) -> Iterator[int]:
    """1 to `count`, each announced as it begins."""
    return parts("training, epoch", range(1, count + 1), count)


@contextmanager
def slow(text: str) -> Iterator[None]:
    """A block outside of a run's progress; where it takes longer than SLOW, a line on stderr says what it does."""
    from hybrid_rlhf.core.distributed import is_main  # not above: it imports torch

    doing(text)
    timer = threading.Timer(SLOW, lambda: print(f"{text} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    if is_main():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
    doing("")  # not after an error, whose message names the activity


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block `listener` is called with each new text."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
