"""Advantage estimators, one row each, and whitening."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf.tensors import masked_sum

Reduce = Callable[[Tensor], Tensor]


def _alone(value: Tensor) -> Tensor:
    """The sum over one process."""
    return value


def gae(rewards: Tensor, action_mask: Tensor, *, values: Tensor, gamma: float, lam: float, group_size: int = 1,
        reduce: Reduce = _alone) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (1506.02438, equations 11-16): (advantages, returns), both (B, R).

    delta_t = r_t + gamma V_{t+1} - V_t with V after the last action 0; A_t = delta_t + gamma lam A_{t+1};
    returns = A + V. rewards, values (B, R); zero at padding. group_size and reduce are not used.
    """
    mask = action_mask.float()
    rewards, values = rewards.float().masked_fill(~action_mask, 0), values.float().masked_fill(~action_mask, 0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage) * mask[:, t]
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, (advantages + values).masked_fill(~action_mask, 0)


def whiten(values: Tensor, mask: Tensor, reduce: Reduce = _alone) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the true positions of `mask` on all processes; zero elsewhere.

    The mean is removed. var is the population variance: it needs no correction for the number of processes.
    """
    values = values.float()
    count = reduce(mask.sum().float()).clamp(min=1)
    mean = reduce(masked_sum(values, mask)) / count
    variance = reduce(masked_sum((values - mean).square(), mask)) / count
    return ((values - mean) * (variance + 1e-8).rsqrt()).masked_fill(~mask, 0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the true positions; 0 where the returns do not vary."""
    returns, errors = returns[mask].float(), (returns - values)[mask].float()
    variance = returns.var(correction=0)
    return float(1 - errors.var(correction=0) / variance) if len(returns) and variance > 0 else 0.0


class Estimator(NamedTuple):
    """fn(rewards, action_mask, *, values, group_size, gamma, lam, reduce) -> (advantages, returns).

    needs_values: whether a critic must be built. needs_group: whether prompts need several samples.
    """

    fn: Callable[..., tuple[Tensor, Tensor]]
    needs_values: bool
    needs_group: bool


ESTIMATORS: dict[str, Estimator] = {"gae": Estimator(gae, needs_values=True, needs_group=False)}
