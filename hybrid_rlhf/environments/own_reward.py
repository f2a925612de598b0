"""The reward that environments themselves know, as a source beside others."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_rlhf.environments.contract import Environments
from hybrid_rlhf.rollout import Rollout


@dataclass
class EnvironmentSource:
    """What the environment of each episode has rewarded it with (get_reward, and the rewards of its steps), as the
    rollout holds it."""

    name: str

    def score(self, rollout: Rollout) -> list[float | None]:
        """`rollout.episode_rewards`: B numbers, None of an episode whose environment has no reward of its own. What a
        turn earned by itself stands at its last token (rollout.token_scores)."""
        rollout.token_scores = rollout.turn_rewards()
        rollout.step_ends = rollout.rewarded_turn_ends()
        return rollout.episode_rewards


def source_of(environments: Environments, malformed_penalty: float = 0.0) -> EnvironmentSource | None:
    """The source of those that have a reward, called as the class where it is one; None where none has."""
    names = {kind.name for kind in environments.kinds if kind.has_reward or kind.has_step or malformed_penalty}
    if not names:
        return None
    return EnvironmentSource(names.pop() if len(names) == 1 else "environment")
