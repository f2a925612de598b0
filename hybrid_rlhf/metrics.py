"""Weighted sums of named quantities, and timers. A mean is divided by its own weight, never by a count of calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hybrid_rlhf.distributed import sum_over_ranks, world_size


class Metrics:
    """Named weighted means. `a + b` pools the observations of both; `compute` divides once, at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # name -> [sum of value * weight, sum of weight]

    def add(self, name: str, value: float | Tensor, weight: float | Tensor = 1.0) -> Metrics:
        """Record `value`, the mean of `weight` observations. A weight of zero records nothing but the name."""
        entry = self._sums.setdefault(name, [0.0, 0.0])
        value, weight = float(value), float(weight)
        if weight:
            entry[0] += value * weight
            entry[1] += weight
        return self

    def __add__(self, other: Metrics) -> Metrics:
        total = Metrics()
        for source in (self, other):
            for name, (value, weight) in source._sums.items():
                entry = total._sums.setdefault(name, [0.0, 0.0])
                entry[0] += value
                entry[1] += weight
        return total

    def renamed(self, names: dict[str, str]) -> Metrics:
        """The same metrics, those in `names` under another name."""
        copy = Metrics()
        copy._sums = {names.get(n, n): list(entry) for n, entry in self._sums.items()}
        return copy

    def over_ranks(self) -> Metrics:
        """The same metrics pooled over all processes. Every process must hold the same names."""
        if world_size() == 1:
            return self
        names = sorted(self._sums)
        table = sum_over_ranks(torch.tensor([self._sums[n] for n in names], dtype=torch.float64))
        total = Metrics()
        total._sums = dict(zip(names, table.tolist(), strict=True))
        return total

    def compute(self) -> dict[str, float]:
        """Each name's weighted mean; names without any weight are left out."""
        return {n: s / w for n, (s, w) in self._sums.items() if w}

    @contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Record the seconds that the block took as `time/{name}`; blocks of one name add up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            entry = self._sums.setdefault(f"time/{name}", [0.0, 1.0])
            entry[0] += time.perf_counter() - start
