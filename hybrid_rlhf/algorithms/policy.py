"""PPO's two losses (1707.06347) on flat vectors of actions, as shares of a minibatch's mean.

`denominator` is the number of actions of the whole minibatch on all processes, so that splitting the minibatch
into micro-batches does not move the gradient. Both return what to report as {name: (mean, weight)}.
"""

from __future__ import annotations

import torch
from torch import Tensor

Observed = dict[str, tuple[Tensor, int]]


def policy_loss(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, cliprange: tuple[float, float],
                denominator: Tensor | float, dual_clip: float | None = None) -> tuple[Tensor, Observed]:
    """Clipped surrogate, equation 7: sum over actions of max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) / denominator.

    ratio = exp(clamp(new - old, +-20)). dual_clip (1912.09729): for A < 0 the loss is at most -dual_clip * A.
    All (N,). Observed: policy/loss, policy/approx_kl (k3 of old against new), policy/clip_fraction (actions whose
    gradient the clip stops).
    """
    log_ratio = (new_logprobs.float() - old_logprobs.float()).clamp(-20, 20)
    ratio, advantages = log_ratio.exp(), advantages.float()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange[0], 1 + cliprange[1])
    losses = torch.maximum(plain, clipped)
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses.sum() / denominator, _observed(losses, log_ratio, ratio, clipped > plain)


@torch.no_grad()
def _observed(losses: Tensor, log_ratio: Tensor, ratio: Tensor, is_clipped: Tensor) -> Observed:
    size = len(losses)
    if not size:
        return {}
    return {"policy/loss": (losses.mean(), size), "policy/approx_kl": ((ratio - 1 - log_ratio).mean(), size),
            "policy/clip_fraction": (is_clipped.float().mean(), size), "policy/ratio": (ratio.mean(), size)}


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float,
               denominator: Tensor | float) -> tuple[Tensor, Observed]:
    """Sum over actions of 0.5 max((V - R)^2, (V_old + clamp(V - V_old, +-cliprange_value) - R)^2) / denominator.

    All (N,). Observed: value/loss, value/clip_fraction (actions where the clipped term is the larger).
    """
    new_values, old_values, returns = new_values.float(), old_values.float(), returns.float()
    near = old_values + (new_values - old_values).clamp(-cliprange_value, cliprange_value)
    plain, clipped = (new_values - returns).square(), (near - returns).square()
    losses = 0.5 * torch.maximum(plain, clipped)
    observed: Observed = {}
    if len(losses):
        observed = {"value/loss": (losses.detach().mean(), len(losses)),
                    "value/clip_fraction": ((clipped > plain).float().mean(), len(losses))}
    return losses.sum() / denominator, observed
