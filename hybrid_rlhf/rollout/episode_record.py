"""What became of a response of several turns: who said what, why it ended, and what went wrong on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.core.metrics import Metrics

# why an episode ends: by itself (the model's last turn calls nothing, or the environment is done); its tokens, its
# turns; or its last answer does not fit into the tokens that are left
DONE, LENGTH, MAX_TURNS, NO_ROOM = "done", "length", "max_turns", "no_room"


@dataclass
class Episode:
    """One response, turn by turn.

    messages: those behind the prompt, the model's with its tool calls, and the environment's: what TRL hands to reward
    functions as a completion. turn_starts, turn_ends: for each of the model's turns, how many tokens the response had
    at its beginning and its end; limits: how many the turn might have. seed, number: of its draws.
    turn_rewards: what each turn earned by itself. reward: what the environment says of the whole (None: nothing).
    environment: the user's object (None: there are only functions); it may be used again in the next rollout.
    has_tools: whether there was anything to call. num_calls: of tools; num_failed: those that raised or do not exist;
    num_late: those without an answer in time; num_malformed: calls that could not be read; num_cut: answers that were
    shortened.
    """

    messages: list[dict] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    seed: int = 0
    number: int = 0
    turn_rewards: list[float] = field(default_factory=list)
    reward: float | None = None
    environment: Any = None
    has_tools: bool = True
    ended: str = ""
    num_calls: int = 0
    num_failed: int = 0
    num_late: int = 0
    num_malformed: int = 0
    num_cut: int = 0

    def replay_record(self, prompt_ids: list[int], response_ids: list[int]) -> dict:
        """What rollout/replay.py needs to draw the episode again, as JSON: the draws' names, and what was said and
        added, in tokens."""
        ends = [0, *self.turn_ends]
        return {"seed": self.seed, "number": self.number, "prompt_ids": prompt_ids, "turns": [
            {"added": response_ids[end:start], "limit": limit, "said": response_ids[start:stop]}
            for end, start, stop, limit in zip(ends, self.turn_starts, self.turn_ends, self.limits, strict=False)]}

    @property
    def said_last(self) -> str:
        """The content of the model's last turn."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")

    @property
    def total_reward(self) -> float | None:
        """All that the environment gave, None where it gives nothing."""
        return None if self.reward is None and not self.turn_rewards else (self.reward or 0.0) + sum(self.turn_rewards)


def readable(messages: Sequence[dict]) -> str:
    """Messages for people: a turn each, calls as name(arguments)."""
    lines = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        said = [f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})" for call in calls]
        name = message.get("name") or message["role"]
        lines.append(f"[{name}] " + " ".join(part for part in (message["content"].strip(), *said) if part))
    return "\n".join(lines)


def measure(episodes: Sequence[Episode]) -> Metrics:
    """What is reported of them; the first two names are TRL's."""
    metrics, size = Metrics(), len(episodes)
    calls = sum(e.num_calls + e.num_malformed for e in episodes)
    failed = sum(e.num_failed + e.num_late + e.num_malformed for e in episodes)
    num_able = sum(e.has_tools for e in episodes)  # a game of messages has no tools, and no share of calls
    metrics.add("tools/call_frequency", calls / max(num_able, 1), num_able)
    metrics.add("tools/failure_frequency", failed / max(calls, 1), calls)
    for name, count in (("malformed", sum(e.num_malformed for e in episodes)),
                        ("late", sum(e.num_late for e in episodes)), ("cut", sum(e.num_cut for e in episodes))):
        metrics.add(f"tools/{name}_frequency", count / max(calls, 1), calls)
    metrics.add("episodes/turns", sum(len(e.turn_ends) for e in episodes) / max(size, 1), size)
    for reason in (MAX_TURNS, NO_ROOM):
        metrics.add(f"episodes/{reason}_ratio", sum(e.ended == reason for e in episodes) / max(size, 1), size)
    return metrics
