"""Losses of the on-policy updates, on flat vectors of the N actions of one micro batch.

Every loss is a sum divided by `denominator`, the number of actions in the whole minibatch over all ranks, or one number
for each action (`denominators`): micro-batch losses then sum to the minibatch's, however it is split. Metrics are
{name: (mean, weight)}, with the number of actions as weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Observed = dict[str, tuple[Tensor, int]]
AGGREGATIONS = ("token", "sequence", "constant", "sum")


class PolicyLoss(NamedTuple):
    """A policy loss as a function of ratios.

    fn(ratio, advantages, new_logprobs, low, high, **options), vectors (N,) -> (N,). level: what the ratio is of: an
    action ("token"), or a whole sequence, as the geometric mean of its actions' ("mean") or as their product ("sum").
    clips: the ratios that the clip range bounds: "both" (below 1 - low and above 1 + high), "above" or "none".
    aggregation: how the method's paper averages it (a row of AGGREGATIONS); None: as the estimator's. options: numbers
    that this loss alone reads, by their names in PPOConfig.
    """

    fn: Callable[..., Tensor]
    level: str = "token"
    clips: str = "both"
    aggregation: str | None = None
    options: tuple[str, ...] = ()


def _clipped(ratio: Tensor, advantages: Tensor, new_logprobs: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))


def _truncated(ratio: Tensor, advantages: Tensor, new_logprobs: Tensor, low: float, high: float) -> Tensor:
    return -ratio.detach().clamp(max=high) * advantages * new_logprobs


def _soft_gated(ratio: Tensor, advantages: Tensor, new_logprobs: Tensor, low: float, high: float, *,
                sapo_temperature_pos: float, sapo_temperature_neg: float) -> Tensor:
    """-A (4 / tau) sigmoid(tau (ratio - 1)), tau by the sign of A: its slope in the ratio is A at 1, and fades away
    from it (arXiv 2511.20347)."""
    temperature = torch.where(advantages > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def _gamma_weighted(ratio: Tensor, advantages: Tensor, new_logprobs: Tensor, low: float, high: float, *,
                    vespo_k_pos: float, vespo_lambda_pos: float, vespo_k_neg: float,
                    vespo_lambda_neg: float) -> Tensor:
    """-w^k exp(lambda (1 - w)) A new, w the ratio without gradient, k and lambda by the sign of A: the weight is 1 at
    w = 1 and fades on both sides (arXiv 2602.10693). w is at least 1e-8, as in TRL."""
    ratio = ratio.detach().clamp(min=1e-8)
    k = torch.where(advantages >= 0, vespo_k_pos, vespo_k_neg)
    decay = torch.where(advantages >= 0, vespo_lambda_pos, vespo_lambda_neg)
    return -(k * ratio.log() + decay * (1 - ratio)).exp() * advantages * new_logprobs


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(_clipped),  # arXiv 1707.06347
    "gspo": PolicyLoss(_clipped, level="mean", aggregation="sequence"),  # arXiv 2507.18071
    # the response is one action, as in TRL's RLOO
    "ppo_sequence": PolicyLoss(_clipped, level="sum", aggregation="sequence"),
    # arXiv 2506.13585: every action keeps its gradient
    "cispo": PolicyLoss(_truncated, clips="above", aggregation="token"),
    "sapo": PolicyLoss(_soft_gated, clips="none", aggregation="sequence",
                       options=("sapo_temperature_pos", "sapo_temperature_neg")),
    "vespo": PolicyLoss(_gamma_weighted, level="sum", clips="none", aggregation="token", options=(
        "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")),
}


def denominators(aggregation: str, owner: Tensor, *, num_actions: Tensor | float, num_sequences: Tensor | float,
                 length: int, num_rows: int | None = None) -> Tensor | float:
    """The divisor of each action's loss, so that the sum over the minibatch is its mean loss.

    token: mean over all actions; sequence: over each sequence's actions, then over sequences; constant: each sequence's
    sum divided by `length`, the same for all (Dr. GRPO); sum: each sequence's sum, then over sequences (LUSPO, arXiv
    2602.05261). owner (N,) long: the row that each action belongs to.
    num_actions, num_sequences: of the minibatch over all ranks. num_rows: see policy_loss. Raises ValueError for
    another aggregation.
    """
    if aggregation == "token":
        return num_actions
    if aggregation == "sequence":
        return num_sequences * _counts(owner, num_rows)[owner]
    if aggregation == "constant":
        return num_sequences * length
    if aggregation == "sum":
        return num_sequences
    raise ValueError(f"aggregation {aggregation!r}: there are {', '.join(AGGREGATIONS)}")


def importance_weights(old_logprobs: Tensor, sampled_logprobs: Tensor, owner: Tensor, *, level: str,
                       cap: float, num_rows: int | None = None) -> Tensor:
    """Truncated importance weights (N,) for the mismatch of the kernels of sampling and training.

    min(exp(old - sampled), cap) of each action (level "token") or of its whole sequence ("sequence": the product).
    """
    log_weight = _of_level(old_logprobs.float() - sampled_logprobs.float(), owner,
                           {"token": "token", "sequence": "sum"}[level], num_rows)
    return log_weight.clamp(-20, 20).exp().clamp(max=cap).detach()


def sequences_within(old_logprobs: Tensor, sampled_logprobs: Tensor, owner: Tensor, *, low: float, high: float,
                     num_rows: int | None = None) -> Tensor:
    """(num_rows,) bool: whether the ratio exp(old - sampled) of a sequence, the geometric mean of its actions', lies in
    [low, high]: masked importance sampling drops the others. Vectors (N,); true for a row without actions."""
    difference = old_logprobs.float() - sampled_logprobs.float()
    totals = difference.new_zeros(_num_rows(owner, num_rows)).index_add(0, owner, difference)
    ratio = (totals / _counts(owner, num_rows).clamp(min=1)).exp().detach()
    return (ratio >= low) & (ratio <= high)


def near_sampler(new_logprobs: Tensor, sampled_logprobs: Tensor, advantages: Tensor, owner: Tensor, *, max_kl: float,
                 num_rows: int | None = None) -> Tensor:
    """(N,) bool: the actions that off-policy sequence masking keeps (DeepSeek-V3.2, arXiv 2512.02556, equation 9).

    Those with an advantage of 0 or more, and those of sequences whose KL(sampler || policy), the mean of sampled - new
    over their actions, is at most `max_kl` nats. Vectors (N,).
    """
    log_ratio = sampled_logprobs.float() - new_logprobs.detach().float()
    return (advantages >= 0) | (_of_level(log_ratio, owner, "mean", num_rows) <= max_kl)


def _counts(owner: Tensor, num_rows: int | None) -> Tensor:
    """(num_rows,) long: how many actions each row has. (bincount would compute the largest row first.)"""
    size = _num_rows(owner, num_rows)
    return owner.new_zeros(size).index_add_(0, owner, torch.ones_like(owner))


def _num_rows(owner: Tensor, num_rows: int | None) -> int:
    return num_rows if num_rows is not None else int(owner.max()) + 1 if len(owner) else 0


def _of_level(log_ratio: Tensor, owner: Tensor | None, level: str, num_rows: int | None) -> Tensor:
    """(N,) log-ratios of actions as those of their sequences: see PolicyLoss."""
    if level == "token" or not len(log_ratio):
        return log_ratio
    if owner is None:
        raise ValueError("the ratios of sequences need owner, the row of each action")
    totals = log_ratio.new_zeros(_num_rows(owner, num_rows)).index_add(0, owner, log_ratio)
    return (totals / _counts(owner, num_rows).clamp(min=1) if level == "mean" else totals)[owner]


def kl_ratio(new_logprobs: Tensor, old_logprobs: Tensor, kind: str, owner: Tensor,
             num_rows: int | None = None) -> Tensor:
    """The factor (N,) of ppo.kl_bias_correction: exp(clamp(new - old, +-20)) of the action, for gspo of its sequence,
    as in TRL."""
    level = "mean" if POLICY_LOSSES[kind].level == "mean" else "token"
    log_ratio = new_logprobs.float() - old_logprobs.float().detach()
    return _of_level(log_ratio, owner, level, num_rows).clamp(-20, 20).exp()


def policy_loss(new_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, cliprange: tuple[float, float],
                denominator: Tensor | float, dual_clip: float | None = None, kind: str = "ppo",
                owner: Tensor | None = None, weights: Tensor | None = None, num_rows: int | None = None,
                **options: float) -> tuple[Tensor, Observed]:
    """Surrogate of row `kind` of POLICY_LOSSES, vectors (N,); ppo: max(-A ratio, -A clip(ratio, 1 - low, 1 + high)).

    ratio = exp(clamp(new - old, +-20)), of the action or of its sequence; cispo: -min(ratio, 1 + high) A new, the
    factor without gradient. cliprange = (low, high). owner (N,) long: the row of each action, for ratios of sequences.
    num_rows: the number of rows (None: up to the last one with an action, for which the host waits for the device).
    options: those of the row, all of them.
    weights (N,): factors of the losses, such as importance_weights. dual_clip c > 1 (arXiv 1912.09729) bounds the loss
    of actions with A < 0 by -c A, so that one extreme ratio cannot dominate. Observed: policy/loss, policy/approx_kl
    (k3 of KL(old || new), nats), policy/clip_fraction, policy/ratio; clip_ratio/low_mean (ratio below 1 - low while
    A < 0), high_mean (above 1 + high while A > 0) and region_mean (either; equals clip_fraction). Raises ValueError
    for vectors of different shapes, for dual_clip <= 1, and for a ratio of sequences without owner.
    """
    _check_flat(new_logprobs, old_logprobs, advantages)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}; it must be above 1")
    row, new = POLICY_LOSSES[kind], new_logprobs.float()
    old, advantages = old_logprobs.float().detach(), advantages.float().detach()
    log_ratio = (new - old).clamp(-20, 20)
    ratio = _of_level(new - old, owner, row.level, num_rows).clamp(-20, 20).exp()
    low = 1 - cliprange[0] if row.clips == "both" else 0.0
    high = math.inf if row.clips == "none" else 1 + cliprange[1]
    loss = row.fn(ratio, advantages, new, low, high, **options)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    if weights is not None:
        loss = loss * weights
    with torch.no_grad():
        too_low, too_high = (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
        is_clipped = too_low | too_high
        observed = {"policy/loss": loss, "policy/approx_kl": log_ratio.expm1() - log_ratio,
                    "policy/clip_fraction": is_clipped, "policy/ratio": ratio, "clip_ratio/low_mean": too_low,
                    "clip_ratio/high_mean": too_high, "clip_ratio/region_mean": is_clipped}
    return (loss / denominator).sum(), _means(observed)


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange_value: float | None,
               denominator: Tensor | float) -> tuple[Tensor, Observed]:
    """Clipped value loss, all vectors (N,): 0.5 max((V - R)^2, (V_old + clamp(V - V_old, +-cliprange_value) - R)^2).

    cliprange_value None: 0.5 (V - R)^2. Observed: value/loss and value/clip_fraction, the share of actions whose
    clipped term is the larger one and has no gradient. Raises ValueError for vectors of different shapes.
    """
    _check_flat(new_values, old_values, returns)
    new, old, returns = new_values.float(), old_values.float().detach(), returns.float().detach()
    plain = (new - returns).square()
    clipped, is_far = plain, torch.zeros_like(plain, dtype=torch.bool)
    if cliprange_value is not None:
        clipped = (old + (new - old).clamp(-cliprange_value, cliprange_value) - returns).square()
        is_far = (new - old).abs() > cliprange_value  # within the range the two terms differ only by rounding
    loss = 0.5 * torch.maximum(plain, clipped)
    return loss.sum() / denominator, _means({"value/loss": loss, "value/clip_fraction": is_far & (clipped > plain)})


def entropy_loss(entropy: Tensor, *, denominator: Tensor | float) -> Tensor:
    """Minus the mean entropy of the actions, in nats, for the entropy bonus. entropy (N,)."""
    return -entropy.float().sum() / denominator


def _check_flat(*vectors: Tensor) -> None:
    """Refuse different shapes, which would broadcast to (N, N)."""
    shapes = [tuple(v.shape) for v in vectors]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"flat vectors of one length are needed, not shapes {shapes}")


def _means(observed: dict[str, Tensor]) -> Observed:
    """The mean and count of each vector; 0 with weight 0 for an empty one."""
    return {name: (values.detach().float().sum() / max(values.numel(), 1), values.numel())
            for name, values in observed.items()}
