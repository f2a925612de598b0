"""Weighted sums of named quantities, and timers. A mean is divided by its own weight, never by a count of calls."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import gather_over_ranks, world_size

# "mean": [sum of value * weight, weight]; "std": [count, mean, squares]; "min", "max": [value, is any];
# "distinct", "top3": how often each item was seen; "nth": the items of each group, in order
Numbers = list[float]
Counts = dict[str, int]
Groups = dict[str, list[str]]
State = Numbers | Counts | Groups


def _mean(a: Numbers, b: Numbers) -> Numbers:
    return [a[0] + b[0], a[1] + b[1]]


def _std(a: Numbers, b: Numbers) -> Numbers:
    """Pooled count, mean and sum of squared deviations (Chan, Golub, LeVeque 1983): nothing cancels."""
    total, gap = a[0] + b[0], b[1] - a[1]
    if not total:
        return a
    return [total, a[1] + gap * b[0] / total, a[2] + b[2] + gap * gap * a[0] * b[0] / total]


def _extreme(choose: Callable, a: Numbers, b: Numbers) -> Numbers:
    return choose((s for s in (a, b) if s[1]), key=lambda s: s[0], default=a)


def _counts(a: Counts, b: Counts) -> Counts:
    return Counter(a) + Counter(b)


def _joined(a: Groups, b: Groups) -> Groups:
    return {group: a.get(group, []) + b.get(group, []) for group in [*a, *(g for g in b if g not in a)]}


def _distinct_nth(groups: Groups) -> float | None:
    """The share of different ones among the first items of all groups, the second ones, ..., over all items."""
    items = [(n, item) for group in groups.values() for n, item in enumerate(group)]
    return len(set(items)) / len(items) if items else None


def _top_share(counts: Counts, most: int) -> float | None:
    return sum(sorted(counts.values())[-most:]) / sum(counts.values()) if counts else None


_MERGE: dict[str, Callable[[Any, Any], State]] = {
    "mean": _mean, "std": _std, "min": partial(_extreme, min), "max": partial(_extreme, max), "distinct": _counts,
    "top1": _counts, "top3": _counts, "nth": _joined}
_VALUE: dict[str, Callable[[Any], float | None]] = {
    "mean": lambda s: s[0] / s[1] if s[1] else None, "std": lambda s: (s[2] / s[0]) ** 0.5 if s[0] else None,
    "min": lambda s: s[0] if s[1] else None, "max": lambda s: s[0] if s[1] else None,
    "distinct": lambda s: len(s) / sum(s.values()) if s else None,
    "top1": lambda s: _top_share(s, 1), "top3": lambda s: _top_share(s, 3), "nth": _distinct_nth}


RECOMPUTED = "engine/logprobs_recomputed"  # of steps whose sampler was too far from the training forward

Observed = Mapping[str, tuple[float | Tensor, float | Tensor]]  # name -> (mean, weight)


def on_host(observed: Sequence[Observed]) -> list[dict[str, tuple[float, float]]]:
    """The same with all numbers as floats: the tensors of a device are copied together, for each copy waits for it."""
    tensors = [x.detach() for each in observed for pair in each.values() for x in pair if isinstance(x, Tensor)]
    numbers = {device: iter(torch.stack([x.double() for x in tensors if x.device == device]).tolist())
               for device in {x.device for x in tensors}}

    def number(x: float | Tensor) -> float:
        return next(numbers[x.device]) if isinstance(x, Tensor) else float(x)

    return [{name: (number(mean), number(weight)) for name, (mean, weight) in each.items()} for each in observed]


class Metrics:
    """Named weighted means, and spreads and extremes. `a + b` pools the observations; `compute` divides at the end."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, Any]] = {}  # name -> (kind, the State that goes with it)

    def add(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> Metrics:
        """Record `value`, the mean of `weight` observations. A weight of zero records nothing but the name."""
        value, weight = float(value), float(weight)
        return self._pool(name, "mean", [value * weight, weight] if weight else [0.0, 0.0])

    def add_all(self, observed: Mapping[str, tuple[float | Tensor, float | Tensor]]) -> Metrics:
        """`add` of each name's (value, weight)."""
        for name, (value, weight) in observed.items():
            self.add(name, value, weight)
        return self

    def add_spread(self, name: str, values: Tensor, kind: str) -> Metrics:
        """Record the "std" (divided by n), "min" or "max" of all observations; those of none record only the name."""
        if not values.numel():
            return self._pool(name, kind, [0.0] * (3 if kind == "std" else 2))
        values = values.detach().double()
        if kind == "std":
            squares = (values - values.mean()).square().sum()
            return self._pool(name, kind, [float(values.numel()), float(values.mean()), float(squares)])
        return self._pool(name, kind, [float(values.min() if kind == "min" else values.max()), 1.0])

    def add_items(self, name: str, items: Iterable[str], kind: str) -> Metrics:
        """Record the share of different items ("distinct"), or that of the three commonest ("top3"), among all."""
        return self._pool(name, kind, Counter(items))

    def add_grouped(self, name: str, items: Iterable[tuple[str, str]]) -> Metrics:
        """Record, of (group, item), the share of different items where each group's n-th is compared with the others'
        n-th: what the items of one group have in common does not count."""
        groups: dict[str, list[str]] = {}
        for group, item in items:
            groups.setdefault(group, []).append(item)
        return self._pool(name, "nth", groups)

    def _pool(self, name: str, kind: str, state: State) -> Metrics:
        known = self._states.get(name)
        if known is not None and known[0] != kind:
            raise ValueError(f"{name} was recorded as a {known[0]} and now as a {kind}")
        self._states[name] = (kind, copy(state) if known is None else _MERGE[kind](known[1], state))
        return self

    def __add__(self, other: Metrics) -> Metrics:
        return Metrics().take(self).take(other)

    def take(self, other: Metrics) -> Metrics:
        """Pool another's observations with these."""
        for name, (kind, state) in other._states.items():
            self._pool(name, kind, state)
        return self

    def renamed(self, names: dict[str, str]) -> Metrics:
        """The same metrics, those in `names` under another name."""
        other = Metrics()
        other._states = {names.get(n, n): (kind, copy(state)) for n, (kind, state) in self._states.items()}
        return other

    def over_ranks(self) -> Metrics:
        """The same metrics pooled over all processes; a name that only some hold counts what those have seen."""
        if world_size() == 1:
            return self
        total = Metrics()
        for states in gather_over_ranks(self._states):
            for name, (kind, state) in states.items():
                total._pool(name, kind, state)
        return total

    def compute(self) -> dict[str, float]:
        """Each name's weighted mean (or spread, or extreme); names without any weight are left out."""
        values = {n: _VALUE[kind](state) for n, (kind, state) in self._states.items()}
        return {n: v for n, v in values.items() if v is not None}

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Record the seconds that the block took as `time/{name}`; blocks of one name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            before = self._states.get(f"time/{name}", ("mean", [0.0, 1.0]))[1]
            self._states[f"time/{name}"] = ("mean", [before[0] + time.perf_counter() - start, 1.0])
