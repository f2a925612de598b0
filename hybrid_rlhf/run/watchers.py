"""Watchers of a run: functions of the program that started it, told of its events, which may ask it for something."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Asked(NamedTuple):
    """What a watcher asks for. After step_end and evaluate: to stop after this step as after the last one, to save, to
    evaluate (not again after evaluate). After end: to export the best checkpoint (train.save_best), not the last step.
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    best: bool = False


# (event, what belongs to it). begin: trainer, step, total_steps. step_begin, step_end: step; the latter with values, as
# log and evaluate have them. save: step. end: step, after which the model is written.
Watcher = Callable[[str, dict], Asked]
_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """Within the block runs tell `watcher` of their events. Every process of a run has its own, asking for the same."""
    if watcher is None:
        yield
        return
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def tell(event: str, **facts: object) -> Asked:
    """Tell the watchers of an event; returns what any of them asks for."""
    asked = [watcher(event, facts) for watcher in _watchers]
    return Asked(*(any(each) for each in zip(*asked, strict=True))) if asked else Asked()
