"""The old log-probabilities of a rollout, and the mismatch between the sampler and training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import sum_over_ranks
from hybrid_rlhf.core.metrics import RECOMPUTED, Metrics
from hybrid_rlhf.core.tensors import masked_mean
from hybrid_rlhf.roles import Actor
from hybrid_rlhf.rollout import Rollout

OLD_LOGPROBS = ("auto", "sampler", "recompute")


@dataclass
class OldLogprobs:
    """Which log-probabilities are the old ones of a rollout: the sampler's, or those of a training forward.

    mode "sampler" and "recompute" are fixed; "auto" takes the sampler's while the mean |sampled - training| stays
    within max_drift (nats per token), and the training forward's otherwise. The drift is measured at every step: on the
    whole rollout where it is recomputed anyway, else on every num_skipped-th sequence.
    """

    mode: str = "auto"
    max_drift: float = 0.02
    num_skipped: int = 8

    def logprobs(self, rollout: Rollout, actor: Actor, metrics: Metrics) -> Tensor:
        """(B, R) old log-probabilities; metrics receives engine/logprob_drift, and whether auto recomputes."""
        if self.mode == "recompute":
            recomputed = actor.logprobs(rollout)
            _mismatch(rollout, recomputed, metrics)
            return recomputed
        sample = rollout.rows(torch.arange(0, len(rollout), self.num_skipped))
        drift = _mismatch(sample, actor.logprobs(sample), metrics)
        if self.mode == "sampler":
            return rollout.sampled_logprobs
        recomputes = not drift <= self.max_drift  # NaN counts as a mismatch
        if recomputes:  # the run's summary counts these steps
            metrics.add(RECOMPUTED, 1.0)
        return actor.logprobs(rollout) if recomputes else rollout.sampled_logprobs


def _mismatch(rollout: Rollout, recomputed: Tensor, metrics: Metrics) -> float:
    """Mean |sampled - recomputed| over the actions of all ranks, so that every rank decides the same."""
    gap = (rollout.sampled_logprobs - recomputed).abs()
    count = rollout.action_mask.sum()
    metrics.add("engine/logprob_drift", masked_mean(gap, rollout.action_mask), count)
    total, count = sum_over_ranks(torch.stack([gap[rollout.action_mask].sum().double(), count.double()])).tolist()
    return total / max(count, 1)
