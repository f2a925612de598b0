"""A run's history of metrics, as metrics.jsonl holds it, and the start and the end of each of its series.

A history is a list of rows {"step": int, name: number}: one for each step, and one with names that begin with eval/ for
each evaluation. The start and the end of a run are means over a tenth of its steps (two at least).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

History = Sequence[dict]


@dataclass(frozen=True)
class Series:
    """One metric's values and their steps, and what its ends are."""

    steps: list[int]
    values: list[float]

    @property
    def size(self) -> int:
        """Steps that an end is the mean of."""
        return max(2, len(self.values) // 10)

    @property
    def start(self) -> float:
        return fmean(self.values[: self.size])

    @property
    def end(self) -> float:
        return fmean(self.values[-self.size :])

    @property
    def higher(self) -> float:
        """The higher one of start and end."""
        return max(self.start, self.end)

    def error(self) -> float:
        """Standard error of the difference of two ends, from what neighbouring steps differ by: a trend adds little."""
        jumps = [(b - a) ** 2 / 2 for a, b in zip(self.values, self.values[1:], strict=False)]
        return math.sqrt(2 * fmean(jumps) / self.size)

    def around(self, place: int) -> float:
        """Mean of the `size` values from `place` on."""
        return fmean(self.values[place : place + self.size])


def series(history: History, name: str) -> Series | None:
    """The values of a metric; None where fewer than four steps have it: too few to have a start and an end."""
    rows = [(row["step"], row[name]) for row in history if is_number(row.get(name))]
    return Series([s for s, _ in rows], [v for _, v in rows]) if len(rows) >= 4 else None


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
