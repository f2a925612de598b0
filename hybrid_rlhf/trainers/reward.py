"""Stage 2: a Bradley-Terry reward model from pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.preference import bradley_terry
from hybrid_rlhf.core.distributed import sum_over_ranks
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import to_device
from hybrid_rlhf.data.collate import PairBatch
from hybrid_rlhf.roles import Reward
from hybrid_rlhf.roles.role_state import load_training_state, oom_limits, training_state


class RewardTrainer:
    """Fits scores so that chosen beats rejected. center_coef pulls the pair's mean score towards zero."""

    progress_keys = ("loss", "accuracy", "margin", "learning_rate")
    can_rehearse = True  # a step's only effects are its optimizer's and those on this object

    def __init__(self, reward: Reward, center_coef: float = 0.0) -> None:
        self.reward, self.center_coef = reward, center_coef

    def step(self, batch: PairBatch) -> Metrics:
        count = sum_over_ranks(torch.tensor(float(len(batch))))
        return self.reward.update(batch.sequences, _pair_rows(batch), lambda *scores: self._loss(batch, count, *scores))

    def _loss(self, batch: PairBatch, count: Tensor, chosen: Tensor, rejected: Tensor,
              index: Tensor) -> tuple[Tensor, dict]:
        """These pairs' share of the mean over the `count` pairs of all processes."""
        margin, count = (to_device(x, chosen.device) for x in (batch.margin[index], count))
        losses = bradley_terry(chosen, rejected, margin, self.center_coef)
        return losses.sum() / count, _observed(losses.detach(), chosen.detach(), rejected.detach())

    @torch.no_grad()
    def evaluate(self, batches: Iterable[PairBatch]) -> Metrics:
        """loss, accuracy, margin and the range of scores over all pairs."""
        metrics = Metrics()
        for batch in batches:
            both = self.reward.score(batch.sequences)
            chosen, rejected = both.chunk(2)
            losses = bradley_terry(chosen, rejected, batch.margin, self.center_coef)
            for name, (mean, weight) in _observed(losses, chosen, rejected).items():
                metrics.add(name, mean, weight)
            metrics.add_spread("min_reward", both, "min").add_spread("max_reward", both, "max")
        return metrics.over_ranks()

    def samples(self) -> list[dict]:
        return []

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        return {"reward": training_state(self.reward), "oom_limits": dict(self.reward.engine.oom_limits)}

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        load_training_state(self.reward, state["reward"])
        self.reward.engine.oom_limits = dict(oom_limits(state))


def _pair_rows(batch: PairBatch) -> Tensor:
    """(P, 2): collate_pairs puts the chosen sequences first, then the rejected ones, in the same order."""
    size = len(batch.margin)
    return torch.stack([torch.arange(size), torch.arange(size) + size], 1)


def _observed(losses: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, tuple[Tensor, int]]:
    size = len(chosen)
    both = torch.cat([chosen, rejected])
    return {"loss": (losses.mean(), size), "accuracy": ((chosen > rejected).float().mean(), size),
            "margin": ((chosen - rejected).mean(), size), "mean_reward": (both.mean(), size)}
