"""How much better an action was than expected. One function and one row of ESTIMATORS per method."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf.tensors import masked_sum

Reduce = Callable[[Tensor], Tensor]  # the sum of a tensor over all ranks


def identity(total: Tensor) -> Tensor:
    """The sum over ranks when there is one rank."""
    return total


class Estimator(NamedTuple):
    """One way to advantages. The row alone says whether a critic is built and whether groups are required.

    fn(rewards (B, R), action_mask (B, R), *, values (B, R) or None, gamma, lam, reduce, group_size) ->
    (advantages (B, R), returns (B, R)), both zero outside the actions.
    """

    fn: Callable[..., tuple[Tensor, Tensor]]
    needs_values: bool
    needs_group: bool


@torch.no_grad()
def gae(rewards: Tensor, action_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 0.95,
        reduce: Reduce = identity, group_size: int = 1) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438): (advantages, returns), each (B, R) fp32.

    delta_t = r_t + gamma * V_{t+1} - V_t with V = 0 after the last action; A_t = delta_t + gamma * lam * A_{t+1};
    returns = A + V. rewards, values (B, R); action_mask (B, R) bool. t counts actions: columns that are none are
    stepped over, come out as zero and are never read, NaN included. reduce and group_size are other rows' business.
    """
    del reduce, group_size
    rewards, values = rewards.float().masked_fill(~action_mask, 0), values.float().masked_fill(~action_mask, 0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        is_action = action_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(is_action, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(is_action, values[:, t], next_value)
        advantages[:, t] = torch.where(is_action, next_advantage, 0.0)
    return advantages, advantages + values


ESTIMATORS: dict[str, Estimator] = {
    "gae": Estimator(gae, needs_values=True, needs_group=False),
}


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """(values - mean) / sqrt(var + 1e-8) over the true positions of `mask` on all ranks; zero elsewhere, fp32.

    The mean is removed. var is the population variance (divided by n, not n - 1): the actions at hand are all there
    are, not a sample of more, and a single action then gives 0 and not NaN. values, mask: the same shape. Every rank
    must call it, with or without actions.
    """
    total, count = reduce(torch.stack([masked_sum(values.double(), mask), mask.sum().double()])).unbind()
    count = count.clamp(min=1)
    centred = values.double() - total / count
    # Two passes: E[x^2] - E[x]^2 cancels when the mean is large.
    variance = reduce(masked_sum(centred.square(), mask)) / count
    return (centred / (variance + 1e-8).sqrt()).masked_fill(~mask, 0).float()


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor, reduce: Reduce = identity) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over the true positions of `mask` on all ranks.

    A scalar: 1 is perfect, 0 no better than a constant, and what is said where the returns do not vary, for there is
    nothing to explain. Every rank must call it, with or without actions.
    """
    both = torch.stack([returns.double()[mask], (returns.double() - values.double())[mask]])  # (2, n)
    count = reduce(mask.sum().double()).clamp(min=1)
    mean = reduce(both.sum(1)) / count
    actual, error = (reduce((both - mean[:, None]).square().sum(1)) / count).unbind()
    return torch.where(actual > 0, 1 - error / actual, 0.0).float()
