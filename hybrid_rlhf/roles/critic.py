"""The critic: the value of every state, one per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import sum_over_ranks
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import predicting
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles.role_state import training_of
from hybrid_rlhf.roles.scoring import last_numbers, per_action, prefix_groups
from hybrid_rlhf.rollout import Rollout


@dataclass
class Critic:
    """The value of each state: the expected reward of the rest of the response.

    is_new: whether its head starts at zero. is_rescaled: whether its head comes from a model whose scores have another
    scale than those to be optimised, such as a reward model that is one of several sources. Both take the scale of the
    first scores (`begin`). mean, std: of these; the value of a state is mean + std times the head's output, which for a
    head that is not new is first normalised by its mean and std on the first responses (head_mean, head_std). A critic
    that is neither has its scale in its weights.
    """

    engine: HybridEngine[ScalarModel]
    max_tokens: int = 8192
    is_new: bool = False
    is_rescaled: bool = False
    mean: float = 0.0
    std: float = 1.0
    head_mean: float = 0.0
    head_std: float = 1.0

    def __post_init__(self) -> None:
        self.engine.name = "critic"

    def begin(self, scores: Tensor, rollout: Rollout | None = None) -> None:
        """Set the scale of a new or rescaled critic before its first update: its values get mean and standard deviation
        of `scores` (B,), the first shaped scores of all processes (NaN: none), and it learns in these standard
        deviations. Does nothing for any other critic. rollout: that of the scores, needed for a head that is not new.

        From zero it would need hundreds of updates to reach scores of 60. Until then advantages are the mean score
        times lambda to the power of the tokens left, which hides the difference between two responses.
        """
        if not (self.is_new or self.is_rescaled) or training_of(self).num_steps:
            return
        is_scored = ~scores.isnan()
        mean, std, count = _moments(scores[is_scored])
        if not count:
            return
        head_mean, head_std = 0.0, 1.0
        if not self.is_new:  # undo an earlier scale
            self.engine.module.mean, self.engine.module.std = 0.0, 1.0
            batch = present(rollout, "the rollout").sequences(self.engine.pad_id)
            head_mean, head_std, _ = _moments(last_numbers(self.engine, batch, self.max_tokens)[is_scored])
        self.set_scale(mean, std or 1.0, head_mean, head_std or 1.0)

    def set_scale(self, mean: float, std: float, head_mean: float = 0.0, head_std: float = 1.0) -> None:
        """Values become mean + std * (head output - head_mean) / head_std."""
        self.mean, self.std, self.head_mean, self.head_std = mean, std, head_mean, head_std
        self.engine.module.mean, self.engine.module.std = head_mean - mean * head_std / std, head_std / std

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

        with self.engine.resident():  # for the trial of prefixes and the update
            return accumulate(self.engine, self.max_tokens, Rows(
                batch.attention_mask.sum(1), micro_batch_loss, prefix_groups(self.engine, batch)))


def _moments(values: Tensor) -> tuple[float, float, float]:
    """Mean, standard deviation and number of the `values` (n,) of all processes; zeros where there are none."""
    values = values.double()
    total, count = sum_over_ranks(torch.stack([values.sum(), torch.tensor(float(len(values)))])).tolist()
    mean = total / max(count, 1)
    squares = float(sum_over_ranks((values - mean).square().sum()))
    return mean, (squares / max(count, 1)) ** 0.5, count
