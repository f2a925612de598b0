"""A trained reward model as a source."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybrid_rlhf.roles import Reward
from hybrid_rlhf.rollout import Rollout


@dataclass
class ModelSource:
    """The stage-2 model. It reads the actor's token ids, so its tokenizer must be the actor's (checked at start)."""

    role: Reward
    name: str = "model"

    def score(self, rollout: Rollout) -> Tensor:
        return self.role.score_rollout(rollout)
