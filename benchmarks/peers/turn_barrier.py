"""The same engine with a barrier per turn: all turns of a round are sampled to their ends, then all tools are awaited,
side by side, then comes the next round. Both classes stand in the place of what they are made of."""

from __future__ import annotations

import time


class BarrierTurns:
    """Turns (engine/decode/multi_turn.py). ended: when each round's last turn was sampled, by time.perf_counter."""

    def __init__(self, turns) -> None:  # noqa: ANN001
        self._turns, self.stops = turns, turns.stops
        self.submit, self.release = turns.submit, turns.release
        self.ended: list[float] = []

    @property
    def is_busy(self) -> bool:
        return self._turns.is_busy

    def step(self) -> list:
        ended: list = []
        while self._turns.is_busy:
            ended += self._turns.step()
        self.ended.append(time.perf_counter())
        return ended


class BarrierPool:
    """CallPool (environments/calls.py)."""

    def __init__(self, pool) -> None:  # noqa: ANN001
        self._pool = pool
        self.start, self.close = pool.start, pool.close

    @property
    def num_waiting(self) -> int:
        return self._pool.num_waiting

    def finished(self, wait: bool) -> list:
        found: list = []
        while wait and self._pool.num_waiting:
            found += self._pool.finished(wait=True)
        return found
