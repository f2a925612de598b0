"""The protocol of judges: a model here (local_backend.py) or behind an address (api_backend.py); and their budget."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hybrid_rlhf.rewards.judge.judge_prompts import Chat

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """A question without an answer. is_fatal: whether the next one would have none either (no such address, a key that
    is refused, a budget that is spent). cure: what to do then."""

    what: str
    is_fatal: bool = False
    cure: str = "see to that"


Arriving = Generator[tuple[int, T | Failure], None, None]  # each chat's number and its answer, as soon as it is there


class Backend(Protocol):
    """name: for messages. identity: what makes its answers what they are, as JSON, for the cache.

    Answers are told one by one, in any order, so that whoever pays for them can keep each at once; `close` of the
    generator ends what has not been asked yet.
    """

    name: str
    identity: list

    def open(self) -> None:
        """Load what there is to load, once."""
        ...

    def complete(self, chats: Sequence[Chat], max_new_tokens: int, seed: int) -> Arriving[str]:
        """The reply to each chat."""
        ...

    def choose(self, chats: Sequence[Chat], words: Sequence[str]) -> Arriving[list[float]]:
        """For each chat the probability of each word as the beginning of the reply, before anything else is said."""
        ...


@dataclass
class Budget:
    """Calls and costs of one process; safe for threads. None: no bound. Prices are for a million tokens.

    What a call may cost at most is set aside while it is in flight, and one that does not fit beside the others waits
    for them, in the end until it is alone: so max_cost is passed by less than that one call.
    """

    max_calls: int | None = None
    max_cost: float | None = None
    input_price: float = 0.0
    output_price: float = 0.0
    calls: int = 0
    cost: float = 0.0
    num_input: int = 0
    num_output: int = 0
    _longest: int = field(default=0, repr=False)  # answer so far, in tokens
    _in_flight: list[float] = field(default_factory=list, repr=False)  # what each call may cost
    _lock: threading.Condition = field(default_factory=threading.Condition, repr=False)

    @contextmanager
    def call(self, most_input: int = 0, most_output: int | None = 0) -> Iterator[Failure | None]:
        """The block of one more call of at most so many tokens, where `pay` is told what it was; with the failure that
        says so where the budget has none left. most_output: None where there is no bound; as the longest answer so
        far."""
        spent, most = self._take(most_input, most_output)
        try:
            yield spent
        finally:
            if spent is None:
                with self._lock:
                    self._in_flight.remove(most)
                    self._lock.notify_all()

    def pay(self, num_input: int, num_output: int) -> None:
        """The tokens of one answer."""
        with self._lock:
            self.num_input += num_input
            self.num_output += num_output
            self._longest = max(self._longest, num_output)
            self.cost += self._price(num_input, num_output)

    def _take(self, most_input: int, most_output: int | None) -> tuple[Failure | None, float]:
        with self._lock:
            while True:
                if self.max_calls is not None and self.calls >= self.max_calls:
                    return Failure(f"reward.judge.max_calls is spent ({self.calls} calls)", True, "raise it"), 0.0
                if self.max_cost is not None and self.cost >= self.max_cost:
                    return Failure(f"reward.judge.max_cost is spent ({self.cost:.4g} of {self.max_cost:g})", True,
                                   "raise it"), 0.0
                most = self._price(most_input, self._longest if most_output is None else most_output)
                if self.max_cost is None or not self._in_flight or (
                        self.cost + sum(self._in_flight) + most <= self.max_cost):
                    self.calls += 1
                    self._in_flight.append(most)
                    return None, most
                self._lock.wait()

    def _price(self, num_input: int, num_output: int) -> float:
        return (num_input * self.input_price + num_output * self.output_price) / 1e6
