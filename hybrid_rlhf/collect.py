"""Prompts to Rollout: the part that all on-policy methods share."""

from __future__ import annotations

import torch

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.rewards import RewardSource, checked_scores
from hybrid_rlhf.roles import Roles
from hybrid_rlhf.rollout import Prompts, Rollout


@torch.no_grad()
def collect(prompts: Prompts, roles: Roles, source: RewardSource, sampling: SamplingConfig, seed: int,
            metrics: Metrics) -> Rollout:
    """Sample `sampling.num_samples` responses to each prompt, then score them and measure every role on them.

    seed makes the sampling a function of the step. metrics receives the time of each phase.
    """
    with metrics.timer("generate"), roles.actor.inference():
        rollout = roles.actor.generate(prompts.repeat(sampling.num_samples), sampling, seed)
    with metrics.timer("score"):
        rollout.logprobs = roles.actor.logprobs(rollout)  # (B, R)
        if roles.ref:
            rollout.ref_logprobs = roles.ref.logprobs(rollout)  # (B, R)
        if roles.critic:
            rollout.values = roles.critic.values(rollout)  # (B, R)
        rollout.scores = checked_scores(source, rollout)  # (B,)
        rollout.source_scores = {source.name: rollout.scores}
    return rollout
