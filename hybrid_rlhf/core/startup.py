"""When Python looks for circles of objects to free: seldom while a run starts, as ever from its first step on.

What a start makes are modules, functions and classes, which stay. Python's collector goes over all of them again and
again while they become more: a fifth to a third of the time to the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Until its end or `restore_gc`: young objects a hundred thousand at a time, the old ones not at all."""
    gc.set_threshold(100_000, 1_000, 1_000)
    try:
        yield
    finally:
        restore_gc()


def restore_gc() -> None:
    gc.set_threshold(*_USUAL)
