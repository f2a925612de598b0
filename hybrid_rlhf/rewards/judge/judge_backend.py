"""What answers a judge's questions: a model here (local_backend.py) or behind an address (api_backend.py)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
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
