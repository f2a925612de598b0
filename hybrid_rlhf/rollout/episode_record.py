"""The record of a response of several turns: its messages, why it ended, and the failures of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.core.metrics import Metrics

# Why an episode ends: by itself (the model's last turn has no call, or the environment is done); at the limit of tokens
# or turns; or because the next messages do not fit into the tokens that are left.
DONE, LENGTH, MAX_TURNS, NO_ROOM = "done", "length", "max_turns", "no_room"


@dataclass
class Episode:
    """One response, turn by turn.

    messages: those after the prompt, the model's with its tool calls and the environment's: the completion that reward
    functions get, as in TRL. turn_starts, turn_ends: for each of the model's turns, the number of response tokens at
    its beginning and its end; limits: the most tokens of each turn. seed, number: of its draws.
    turn_rewards: the reward of each turn. reward: that of the whole episode (None: the environment gives none).
    environment: the user's object, which may be used again in the next rollout (None: there are only functions, or it
    lives in another process). has_tools: whether there were tools. num_calls: of tools; num_failed: those that raised
    or do not exist; num_late: those that timed out; num_malformed: calls that could not be parsed; num_cut: answers
    that were shortened.
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
    ended: str = ""
    has_tools: bool = False
    num_calls: int = 0
    num_failed: int = 0
    num_late: int = 0
    num_malformed: int = 0
    num_cut: int = 0

    def replay_record(self, prompt_ids: list[int], response_ids: list[int]) -> dict:
        """What rollout/episodes.py needs to sample the episode again, as JSON: seed, number, and the tokens that were
        sampled and added."""
        ends = [0, *self.turn_ends]
        return {"seed": self.seed, "number": self.number, "prompt_ids": prompt_ids, "turns": [
            {"added": response_ids[end:start], "limit": limit, "said": response_ids[start:stop]}
            for end, start, stop, limit in zip(ends, self.turn_starts, self.turn_ends, self.limits, strict=False)]}

    @property
    def last_text(self) -> str:
        """The content of the model's last turn."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "assistant"), "")

    @property
    def total_reward(self) -> float | None:
        """The sum of the environment's rewards, None where it gives none."""
        return None if self.reward is None and not self.turn_rewards else (self.reward or 0.0) + sum(self.turn_rewards)


def readable(messages: Sequence[dict]) -> str:
    """Messages for people: a turn each, calls as name(arguments)."""
    lines = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        shown = [f"{call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})" for call in calls]
        name = message.get("name") or message["role"]
        lines.append(f"[{name}] " + " ".join(part for part in (message["content"].strip(), *shown) if part))
    return "\n".join(lines)


def measure(episodes: Sequence[Episode]) -> Metrics:
    """The metrics of a rollout's episodes."""
    acting = [e for e in episodes if e.has_tools]
    metrics, size = _of_tools(acting) if acting else Metrics(), len(episodes)
    metrics.add("episodes/turns", sum(len(e.turn_ends) for e in episodes) / max(size, 1), size)
    for reason in (MAX_TURNS, NO_ROOM):
        metrics.add(f"episodes/{reason}_ratio", sum(e.ended == reason for e in episodes) / max(size, 1), size)
    return metrics


def _of_tools(episodes: Sequence[Episode]) -> Metrics:
    """Calls per episode, and shares of the calls; the first two names are TRL's."""
    metrics, size = Metrics(), len(episodes)
    calls = sum(e.num_calls + e.num_malformed for e in episodes)
    failed = sum(e.num_failed + e.num_late + e.num_malformed for e in episodes)
    metrics.add("tools/call_frequency", calls / size, size)
    metrics.add("tools/failure_frequency", failed / max(calls, 1), calls)
    for name, count in (("malformed", sum(e.num_malformed for e in episodes)),
                        ("late", sum(e.num_late for e in episodes)), ("cut", sum(e.num_cut for e in episodes))):
        metrics.add(f"tools/{name}_frequency", count / max(calls, 1), calls)
    return metrics
