"""The reference policy: the frozen model of the KL penalty."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.roles.scoring import per_action, per_sequence
from hybrid_rlhf.rollout import Rollout


@dataclass
class Reference:
    """The frozen policy of the KL penalty. `logprobs(rollout)` -> (B, R)."""

    engine: HybridEngine[PolicyModule]
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reference"

    def logprobs(self, rollout: Rollout) -> Tensor:
        return per_action(self.engine, rollout, self.max_tokens,
                          lambda rows: self.engine(rows, temperature=rollout.temperature).logprobs)

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's loss tokens, without gradients."""
        return per_sequence(self.engine, batch, self.max_tokens)
