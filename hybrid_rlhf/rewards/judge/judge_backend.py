"""The protocol of judge backends: a local model (local_backend.py) or an HTTP API (api_backend.py); their budget."""

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
    """A question without an answer. is_fatal: whether every later question would fail too (unknown address, refused
    key, spent budget). cure: what the user can do then."""

    what: str
    is_fatal: bool = False
    cure: str = "see to that"


Arriving = Generator[tuple[int, T | Failure], None, None]  # a chat's index and its answer, as it arrives


class Backend(Protocol):
    """name: for messages. identity: all that its answers depend on, as JSON, for the cache's keys.

    Answers are yielded one by one, in any order, so that the caller can cache each at once; `close` of the generator
    cancels the requests that are not sent yet.
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
        """For each chat the probability that the reply begins with each word."""
        ...


@dataclass
class Budget:
    """Calls and costs of one process; thread-safe. None: no bound. Prices are per million tokens.

    The most that a call may cost is reserved while it is in flight. A call that does not fit beside the others waits
    for them, in the end until it is alone: so max_cost is exceeded by less than that one call.
    """

    max_calls: int | None = None
    max_cost: float | None = None
    input_price: float = 0.0
    output_price: float = 0.0
    calls: int = 0
    cost: float = 0.0
    num_input: int = 0
    num_output: int = 0
    _longest: int = field(default=0, repr=False)  # tokens of the longest answer so far
    _in_flight: list[float] = field(default_factory=list, repr=False)  # the most that each call may cost
    _lock: threading.Condition = field(default_factory=threading.Condition, repr=False)

    @contextmanager
    def call(self, most_input: int = 0, most_output: int | None = 0) -> Iterator[Failure | None]:
        """Reserve one more call of at most so many tokens for the block, in which `pay` records its tokens; yields a
        Failure if the budget is spent. most_output: None if there is no bound: the longest answer so far counts."""
        spent, most = self._take(most_input, most_output)
        try:
            yield spent
        finally:
            if spent is None:
                with self._lock:
                    self._in_flight.remove(most)
                    self._lock.notify_all()

    def pay(self, num_input: int, num_output: int) -> None:
        """Record the tokens of one answer."""
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
