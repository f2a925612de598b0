"""What a judge may cost: questions counted, tokens paid, and an end to both."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from hybrid_rlhf.rewards.judge.judge_backend import Failure


@dataclass
class Budget:
    """Calls and costs of one process; safe for threads. None: no bound. Prices are for a million tokens."""

    max_calls: int | None = None
    max_cost: float | None = None
    input_price: float = 0.0
    output_price: float = 0.0
    calls: int = 0
    cost: float = 0.0
    num_input: int = 0
    num_output: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def take(self) -> Failure | None:
        """One more call; where the budget has none left, the failure that says so."""
        with self._lock:
            if self.max_calls is not None and self.calls >= self.max_calls:
                return Failure(f"reward.judge.max_calls is spent ({self.calls} calls)", True, "raise it")
            if self.max_cost is not None and self.cost >= self.max_cost:
                return Failure(f"reward.judge.max_cost is spent ({self.cost:.4g} of {self.max_cost:g})", True,
                               "raise it")
            self.calls += 1
            return None

    def pay(self, num_input: int, num_output: int) -> None:
        """The tokens of one answer."""
        with self._lock:
            self.num_input += num_input
            self.num_output += num_output
            self.cost += (num_input * self.input_price + num_output * self.output_price) / 1e6
