"""What this process is doing at the moment, in words: long phases say it, the live view of a run shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[str], None]] = []
_now = "starting"


def doing(text: str) -> None:
    """Say what begins now ("sampling", "epoch 2 of 4"); "" when it is over. Costs nothing where nobody listens."""
    global _now
    _now = text
    for listener in _listeners:
        listener(text)


def now() -> str:
    """What was said last; "starting" before anything was."""
    return _now


def epochs(count: int) -> Iterator[int]:
    """1 to `count`, each said as it begins."""
    for number in range(1, count + 1):
        doing(f"training, epoch {number} of {count}")
        yield number


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Within the block `listener` is told."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
