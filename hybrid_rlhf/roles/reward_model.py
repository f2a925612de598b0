"""The reward model: one score for a whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles.scoring import at_last, last_numbers, prefix_groups
from hybrid_rlhf.rollout import Rollout


@dataclass
class Reward:
    """A reward model: one score per sequence, read at its last real token."""

    engine: HybridEngine[ScalarModel]
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reward model"

    def score(self, batch: SequenceBatch) -> Tensor:
        """(B,) fp32 scores on the CPU, without gradients."""
        return last_numbers(self.engine, batch, self.max_tokens)

    def score_rollout(self, rollout: Rollout) -> Tensor:
        """(B,) scores of prompt and response together."""
        return self.score(rollout.sequences(self.engine.pad_id))

    def update(self, batch: SequenceBatch, pairs: Tensor, loss_fn: Callable) -> Metrics:
        """One optimizer step on pairs. pairs (P, 2) long: rows of chosen and rejected.

        A pair is never split: micro-batches are made of pairs. loss_fn(chosen (p,), rejected (p,), index of pairs)
        -> their share of the loss, and {metric: (mean, weight)}.
        """
        with self.engine.resident():
            return self._update(batch, pairs, loss_fn)

    def _update(self, batch: SequenceBatch, pairs: Tensor, loss_fn: Callable) -> Metrics:
        lengths, groups = batch.attention_mask.sum(1), prefix_groups(self.engine, batch)

        def micro_batch_loss(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(pairs[index].T.reshape(-1)).to(self.engine.device)
            return loss_fn(*at_last(self.engine(rows), rows).chunk(2), index)

        return accumulate(self.engine, self.max_tokens, Rows(
            lengths[pairs].amax(1) * 2, micro_batch_loss,  # a pair costs two rows of its longer side
            None if groups is None else groups[pairs[:, 0]]))
