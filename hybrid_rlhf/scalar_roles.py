"""The roles that give one number per token: the critic and the reward model. roles.py has the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.distributed import sum_over_ranks
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.accumulate import Rows, accumulate
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.rollout import Rollout
from hybrid_rlhf.scoring import per_action, prefix_groups, score
from hybrid_rlhf.tensors import SequenceBatch, last_true, predicting


@dataclass
class Critic:
    """The value of each state: what the rest of the response will be paid.

    is_new: whether its head is of zeros and has to find the scale of the scores (`begin`). mean, std: the value of a
    state is mean + std times what the head says; a critic that is not new has its scale in its weights.
    """

    engine: HybridEngine
    max_tokens: int = 8192
    is_new: bool = False
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        self.engine.name = "critic"

    def begin(self, scores: Tensor) -> None:
        """Before the first update of a new critic: its values are the mean of `scores` (B,), what the first responses
        of all processes are paid, and it learns in their standard deviations. Does nothing for any other critic.

        From zero it would need hundreds of updates to reach scores of 60, and until then advantages are the mean score
        times lambda to the number of tokens left, beside which the difference between two responses is lost.
        """
        if not self.is_new or self.engine.training.num_steps:
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

        return accumulate(self.engine, self.max_tokens, Rows(
            batch.attention_mask.sum(1), micro_batch_loss, prefix_groups(self.engine, batch)))


@dataclass
class Reward:
    """A reward model: one score per sequence, read at its last real token."""

    engine: HybridEngine
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reward model"

    @torch.no_grad()
    def score(self, batch: SequenceBatch) -> Tensor:
        """(B,) fp32 scores on the CPU, without gradients."""
        out = torch.zeros(len(batch))
        for index, scores in score(self.engine, batch, self.max_tokens, lambda rows: _last(self.engine(rows), rows)):
            out[index] = scores.cpu()
        return out

    def score_rollout(self, rollout: Rollout) -> Tensor:
        """(B,) scores of prompt and response together."""
        return self.score(rollout.sequences(self.engine.pad_id))

    def update(self, batch: SequenceBatch, pairs: Tensor, loss_fn: Callable) -> Metrics:
        """One optimizer step on pairs. pairs (P, 2) long: rows of chosen and rejected.

        A pair is never torn apart: micro-batches are made of pairs. loss_fn(chosen (p,), rejected (p,), index of pairs)
        -> their share of the loss, and {metric: (mean, weight)}.
        """
        lengths, groups = batch.attention_mask.sum(1), prefix_groups(self.engine, batch)

        def micro_batch_loss(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(pairs[index].T.reshape(-1)).to(self.engine.device)
            return loss_fn(*_last(self.engine(rows), rows).chunk(2), index)

        return accumulate(self.engine, self.max_tokens, Rows(
            lengths[pairs].amax(1) * 2, micro_batch_loss,  # a pair costs two rows of its longer side
            None if groups is None else groups[pairs[:, 0]]))


def _last(scores: Tensor, rows: SequenceBatch) -> Tensor:
    """(B, T) -> (B,): each row's number at its last real token."""
    return scores.gather(1, last_true(rows.attention_mask)[:, None])[:, 0]
