"""Losses of the on-policy updates, on flat vectors of the N actions of one micro batch.

Every loss is a sum divided by `denominator`, the number of actions in the whole minibatch over all ranks: micro-batch
losses then add up to the minibatch's, however it was cut. What to report comes as {name: (mean, weight)}, with the
number of actions as weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

Observed = dict[str, tuple[Tensor, int]]


def policy_loss(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, cliprange: tuple[float, float],
                denominator: Tensor | float, dual_clip: float | None = None) -> tuple[Tensor, Observed]:
    """Clipped surrogate (arXiv 1707.06347), all vectors (N,): max(-A ratio, -A clip(ratio, 1 - low, 1 + high)).

    ratio = exp(clamp(new - old, +-20)); cliprange = (low, high). dual_clip c > 1 (arXiv 1912.09729) bounds the loss of
    actions with A < 0 by -c A, so that a ratio gone astray cannot dominate. Observed: policy/loss, policy/approx_kl
    (k3 of KL(old || new), nats), policy/clip_fraction, policy/ratio; clip_ratio/low_mean (ratio below 1 - low while
    A < 0), high_mean (above 1 + high while A > 0) and region_mean (either; equals clip_fraction). Raises ValueError
    for vectors of unlike shapes and for dual_clip <= 1.
    """
    _check_flat(new_logprobs, old_logprobs, advantages)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1")
    old, advantages = old_logprobs.float().detach(), advantages.float().detach()
    log_ratio = (new_logprobs.float() - old).clamp(-20, 20)
    ratio = log_ratio.exp()
    low, high = 1 - cliprange[0], 1 + cliprange[1]
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    with torch.no_grad():
        too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        is_clipped = too_low | too_high
        observed = {"policy/loss": loss, "policy/approx_kl": log_ratio.expm1() - log_ratio,
                    "policy/clip_fraction": is_clipped, "policy/ratio": ratio, "clip_ratio/low_mean": too_low,
                    "clip_ratio/high_mean": too_high, "clip_ratio/region_mean": is_clipped}
    return loss.sum() / denominator, _means(observed)


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float | None,
               denominator: Tensor | float) -> tuple[Tensor, Observed]:
    """Clipped value loss, all vectors (N,): 0.5 max((V - R)^2, (V_old + clamp(V - V_old, +-cliprange_value) - R)^2).

    cliprange_value None: 0.5 (V - R)^2. Observed: value/loss and value/clip_fraction, the share of actions whose
    clipped term is the larger one and passes no gradient. Raises ValueError for vectors of unlike shapes.
    """
    _check_flat(new_values, old_values, returns)
    new, old, returns = new_values.float(), old_values.float().detach(), returns.float().detach()
    plain = (new - returns).square()
    clipped, is_far = plain, torch.zeros_like(plain, dtype=torch.bool)
    if cliprange_value is not None:
        clipped = (old + (new - old).clamp(-cliprange_value, cliprange_value) - returns).square()
        is_far = (new - old).abs() > cliprange_value  # within the range the two terms differ by rounding alone
    loss = 0.5 * torch.maximum(plain, clipped)
    return loss.sum() / denominator, _means({"value/loss": loss, "value/clip_fraction": is_far & (clipped > plain)})


def entropy_loss(entropy: Tensor, *, denominator: Tensor | float) -> Tensor:
    """Minus the mean entropy of the actions, in nats: what a bonus coefficient multiplies. entropy (N,)."""
    return -entropy.float().sum() / denominator


def _check_flat(*vectors: Tensor) -> None:
    """Unlike shapes would broadcast to (N, N) and train on nonsense."""
    shapes = [tuple(v.shape) for v in vectors]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"flat vectors of one length are needed, not shapes {shapes}")


def _means(observed: dict[str, Tensor]) -> Observed:
    """The mean and count of each vector; 0 with weight 0 for an empty one."""
    return {name: (values.detach().float().sum() / max(values.numel(), 1), values.numel())
            for name, values in observed.items()}
