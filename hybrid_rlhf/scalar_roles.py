"""The roles that give one number per token: the critic and the reward model. roles.py has the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.distributed import sum_over_ranks
from hybrid_rlhf.engine import HybridEngine, micro_batches
from hybrid_rlhf.measuring import kin, measure, per_action
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.rollout import Rollout
from hybrid_rlhf.tensors import SequenceBatch, last_true, predicting


@dataclass
class Critic:
    """The value of each state: what the rest of the response will be paid."""

    engine: HybridEngine
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "critic"

    def values(self, rollout: Rollout) -> Tensor:
        """(B, R): the value before each action."""
        return per_action(self.engine, rollout, self.max_tokens, lambda rows: predicting(self.engine(rows), rows))

    def update(self, minibatch: Rollout, loss: Callable) -> Metrics:
        """One optimizer step. `loss(new_values (N,), rows of the minibatch, action count over all ranks)`."""
        batch, count = minibatch.sequences(self.engine.pad_id), sum_over_ranks(minibatch.action_mask.sum())

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(index).to(self.engine.device)
            return loss(predicting(self.engine(rows), rows), minibatch.rows(index).to(self.engine.device), count)

        return micro_batches.update(self.engine, self.max_tokens, micro_batches.Part(
            batch.attention_mask.sum(1), share, kin(self.engine, batch)))


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
        for index, found in measure(self.engine, batch, self.max_tokens, lambda rows: _last(self.engine(rows), rows)):
            out[index] = found.cpu()
        return out

    def score_rollout(self, rollout: Rollout) -> Tensor:
        """(B,) scores of prompt and response together."""
        return self.score(rollout.sequences(self.engine.pad_id))

    def update(self, batch: SequenceBatch, pairs: Tensor, loss: Callable) -> Metrics:
        """One optimizer step on pairs. pairs (P, 2) long: rows of chosen and rejected.

        A pair is never torn apart: micro-batches are made of pairs. `loss(chosen (p,), rejected (p,), index of pairs)`.
        """
        lengths, related = batch.attention_mask.sum(1), kin(self.engine, batch)
        widths = lengths[pairs].amax(1) * 2  # a pair costs two rows of its longer side

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(pairs[index].T.reshape(-1)).to(self.engine.device)
            return loss(*_last(self.engine(rows), rows).chunk(2), index)

        return micro_batches.update(self.engine, self.max_tokens, micro_batches.Part(
            widths, share, None if related is None else related[pairs[:, 0]]))


def _last(scores: Tensor, rows: SequenceBatch) -> Tensor:
    """(B, T) -> (B,): each row's number at its last real token."""
    return scores.gather(1, last_true(rows.attention_mask)[:, None])[:, 0]
