"""Relax garbage collection while a run starts, until its first step.

A start creates modules, functions and classes, which stay. Python's collector traverses all of them again and again as
they grow: a fifth to a third of the time to the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_USUAL = gc.get_threshold()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Until its end or `restore_gc`, collect young objects a hundred thousand at a time, and old ones not at all."""
    gc.set_threshold(100_000, 1_000, 1_000)
    try:
        yield
    finally:
        restore_gc()


def restore_gc() -> None:
    gc.set_threshold(*_USUAL)
