"""The roles that give one number per token: the critic and the reward model. roles.py has the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.distributed import sum_over_ranks, world_size
from hybrid_rlhf.engine import HybridEngine, micro_batches
from hybrid_rlhf.engine.memory import peak_in
from hybrid_rlhf.measuring import kin, measure, per_action
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.rollout import Rollout
from hybrid_rlhf.tensors import SequenceBatch, last_true, predicting, scatter


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

    def update(self, minibatch: Rollout, loss: Callable) -> Metrics:
        """One optimizer step. `loss(new_values (N,), rows of the minibatch, action count over all ranks)`."""
        batch = minibatch.sequences(self.engine.pad_id)
        return self._update(minibatch, batch, loss, lambda index: self._values_of(batch, index))

    def can_measure_in_update(self, rollout: Rollout) -> bool:
        """Whether `first_update` may stand for `values` and an `update` with the whole rollout: no other process waits
        in between, and all forwards together, which then wait for their backwards, fit a micro-batch's tokens."""
        if world_size() > 1 or self.engine.training is None or self.engine.training.stage:
            return False
        batch = rollout.sequences(self.engine.pad_id)
        lengths = batch.attention_mask.sum(1)
        budget = micro_batches.budget(self.engine, micro_batches.UPDATE, self.max_tokens)
        return sum(len(g) * int(lengths[g].max()) for g in self._groups(batch)) <= budget

    def first_update(self, rollout: Rollout, ready: Callable[[Tensor], None], loss: Callable,
                     metrics: Metrics) -> Metrics:
        """`values` and `update` with the rollout whole, by one forward of each row: the one that is trained on.

        `ready(values (B, R))` is called with them before the first loss is asked for; it fills in what the loss reads,
        rollout.values among it. metrics receives the peak of the forwards.
        """
        batch = rollout.sequences(self.engine.pad_id)
        waiting: list[tuple[Tensor, Tensor]] = []  # rows and their new values, whose backward is to come
        has_tried = False

        def measured() -> Tensor:
            nonlocal has_tried
            waiting.clear()
            if has_tried:  # and memory ran out: the values first, then micro-batch by micro-batch
                values = self.values(rollout)
                self.engine.module.train()
                return values
            has_tried, out = True, torch.zeros(rollout.action_mask.shape)
            for index in self._groups(batch):
                waiting.append((index, self._values_of(batch, index)))
                out[index] = scatter(waiting[-1][1].detach().float().cpu(), rollout.action_mask[index])
            return out

        def new_values(index: Tensor) -> Tensor:
            if rollout.values is None:
                with peak_in(metrics, "critic/score", self.engine.device):
                    values = measured()
                ready(values)
            if waiting and torch.equal(waiting[0][0], index):
                return waiting.pop(0)[1]
            waiting.clear()
            return self._values_of(batch, index)

        return self._update(rollout, batch, loss, new_values)

    def _groups(self, batch: SequenceBatch) -> list[Tensor]:
        """The micro-batches of an update."""
        return micro_batches.groups(self.engine, micro_batches.UPDATE, batch.attention_mask.sum(1), self.max_tokens,
                                    kin(self.engine, batch))

    def _values_of(self, batch: SequenceBatch, index: Tensor) -> Tensor:
        """(N,): the value before each action of these rows."""
        rows = batch.rows(index).to(self.engine.device)
        return predicting(self.engine(rows), rows)

    def _update(self, rollout: Rollout, batch: SequenceBatch, loss: Callable,
                new_values: Callable[[Tensor], Tensor]) -> Metrics:
        count = sum_over_ranks(rollout.action_mask.sum())

        def share(index: Tensor) -> tuple[Tensor, dict]:
            values = new_values(index)  # before the rows are read, for it may fill them in
            return loss(values, rollout.rows(index).to(self.engine.device), count)

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
