"""The critic: the value of every state, one number per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import sum_over_ranks
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import predicting
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles.role_state import training_of
from hybrid_rlhf.roles.scoring import per_action, prefix_groups
from hybrid_rlhf.rollout import Rollout


@dataclass
class Critic:
    """The value of each state: the reward that the rest of the response will have.

    is_new: whether its head is of zeros and has to find the scale of the scores (`begin`). mean, std: the value of a
    state is mean + std times what the head says; a critic that is not new has its scale in its weights.
    """

    engine: HybridEngine[ScalarModel]
    max_tokens: int = 8192
    is_new: bool = False
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        self.engine.name = "critic"

    def begin(self, scores: Tensor) -> None:
        """Before the first update of a new critic: its values are the mean of `scores` (B,), the first shaped scores
        of all processes, and it learns in their standard deviations. Does nothing for any other critic.

        From zero it would need hundreds of updates to reach scores of 60, and until then advantages are the mean score
        times lambda to the number of tokens left, beside which the difference between two responses is lost.
        """
        if not self.is_new or training_of(self).num_steps:
            return
        scores = scores.double()
        total, count = sum_over_ranks(torch.stack([scores.sum(), torch.tensor(float(len(scores)))])).tolist()
        squares = float(sum_over_ranks((scores - total / count).square().sum()))
        self.set_scale(total / count, (squares / count) ** 0.5 or 1.0)

    def set_scale(self, mean: float, std: float) -> None:
        """Values are mean + std times what the head says."""
        self.mean, self.std = mean, std
        self.engine.module.mean, self.engine.module.std = -mean / std, 1 / std

    def values(self, rollout: Rollout) -> Tensor:
        """(B, R): the value before each action."""
        return per_action(self.engine, rollout, self.max_tokens, lambda rows: predicting(self.engine(rows), rows))

    def update(self, minibatch: Rollout, loss_fn: Callable) -> Metrics:
        """One optimizer step. loss_fn(new_values (N,), rows of the minibatch, its Totals) -> their share of the loss,
        and {metric: (mean, weight)}."""
        batch, totals = minibatch.sequences(self.engine.pad_id), minibatch.totals()

        def micro_batch_loss(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(index).to(self.engine.device)
            new_values = predicting(self.engine(rows), rows)
            return loss_fn(new_values, minibatch.rows(index).to(self.engine.device), totals)

        with self.engine.staying():  # for the trial of prefixes and the update
            return accumulate(self.engine, self.max_tokens, Rows(
                batch.attention_mask.sum(1), micro_batch_loss, prefix_groups(self.engine, batch)))
