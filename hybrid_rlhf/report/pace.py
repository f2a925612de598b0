"""How far a run is, and how long it still takes."""

from __future__ import annotations

import time


class Pace:
    """total: steps of the run; max_seconds: or as long as that."""

    def __init__(self, total: int, max_seconds: float | None = None) -> None:
        self.total, self.max_seconds = total, max_seconds
        self._marks: list[tuple[int, float]] = []  # when steps ended: the first and the last of this process
        self._started = time.perf_counter()

    def begin(self) -> None:
        """The clock starts."""
        self._started = time.perf_counter()

    def mark(self, step: int) -> None:
        """`step` has ended."""
        self._marks = [*self._marks[:1], (step, time.perf_counter())]

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._started

    def seconds_left(self) -> float:
        """Estimate from the mean time of a step, the first one of this process excepted: compilers and caches warm up
        in it. Infinite before the second; never more than max_seconds leaves."""
        now, left = time.perf_counter(), float("inf")
        if len(self._marks) > 1:
            (first, began), (last, ended) = self._marks
            left = max(0.0, (ended - began) / (last - first) * (self.total - last) - (now - ended))
        elif self._marks and self._marks[-1][0] == self.total:
            left = 0.0
        return left if self.max_seconds is None else max(0.0, min(left, self.max_seconds - (now - self._started)))

    def share(self, step: int) -> float:
        """How much of the run is done after `step`, 0 to 1, by steps or by time, whichever is more."""
        share = step / self.total
        return max(share, min(1.0, self.passed / self.max_seconds)) if self.max_seconds else share
