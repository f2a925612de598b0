"""Preference losses: one function per loss, from chosen and rejected responses to one loss per pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu


def bradley_terry(chosen_scores: Tensor, rejected_scores: Tensor, margin: Tensor | float | None = None,
                  center_coef: float = 0.0) -> Tensor:
    """Loss of each pair (P,): -log sigmoid(s_chosen - s_rejected - margin) + center_coef (s_chosen + s_rejected)^2.

    chosen_scores, rejected_scores (P,); margin (P,), one number, or None for 0 (arXiv 2203.02155; margin 2307.09288;
    centering 2312.09244). A ranking of K responses is its K (K - 1) / 2 pairs. Raises ValueError if the shapes of the
    scores, or of a margin given per pair, differ.
    """
    chosen, rejected = chosen_scores.float(), rejected_scores.float()
    per_pair = margin.shape if isinstance(margin, Tensor) and margin.ndim else chosen.shape
    if not chosen.shape == rejected.shape == per_pair:
        raise ValueError(f"pairs need as many chosen as rejected scores and margins, not {tuple(chosen.shape)}, "
                         f"{tuple(rejected.shape)} and {tuple(per_pair)}")
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    losses = -logsigmoid(difference)
    return losses + center_coef * (chosen + rejected).square() if center_coef else losses


def dpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0, **_: object) -> Tensor:
    """Direct preference optimisation (2305.18290): -log sigmoid(beta (chosen - rejected)) of each pair (P,).

    chosen, rejected (P,): log(policy / reference), summed over the response. label_smoothing: the assumed share of
    pairs with a wrong label (conservative DPO).
    """
    return _smoothed(beta * (chosen.float() - rejected.float()), label_smoothing)


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float, **_: object) -> Tensor:
    """Identity preference optimisation (2310.12036, eq. 17): (chosen - rejected - 1 / (2 beta))^2 of each pair (P,).

    chosen, rejected (P,): log(policy / reference), averaged over the response's tokens, as by its authors and in TRL.
    """
    return (chosen.float() - rejected.float() - 1 / (2 * beta)).square()


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float, **_: object) -> Tensor:
    """The hinge of SLiC and RSO (2309.06657): max(0, 1 - beta (chosen - rejected)) of each pair (P,). Sums, as dpo."""
    return relu(1 - beta * (chosen.float() - rejected.float()))


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, simpo_gamma: float, label_smoothing: float = 0.0,
          **_: object) -> Tensor:
    """SimPO (2405.14734, eq. 6): -log sigmoid(beta (chosen - rejected) - simpo_gamma) of each pair (P,).

    chosen, rejected (P,): the policy's own log-probabilities, averaged over the response's tokens.
    """
    return _smoothed(beta * (chosen.float() - rejected.float()) - simpo_gamma, label_smoothing)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float, **_: object) -> Tensor:
    """ORPO (2403.07691, eq. 6): -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)) of each pair (P,).

    chosen, rejected (P,): the policy's own log-probabilities, averaged over the response's tokens; odds = p / (1 - p).
    The first term is the paper's supervised loss, of the chosen response alone; TRL's counts the prompt too.
    """
    chosen, rejected = chosen.float(), rejected.float()
    return -chosen - beta * logsigmoid(chosen - rejected - _log1mexp(chosen) + _log1mexp(rejected))


def kto(ratios: Tensor, labels: Tensor, kl: Tensor, *, beta: float, desirable_weight: float,
        undesirable_weight: float, **_: object) -> Tensor:
    """Kahneman-Tversky optimisation (2402.01306, eq. 7) of each response (B,): its weight minus its value.

    ratios (B,): log(policy / reference), summed over the response; labels (B,) bool, whether it is desirable; kl: the
    reference point, one number, not below 0 (see `kto_kl`). weight (1 - sigmoid(+-beta (ratio - kl))).
    """
    sign = torch.where(labels, 1.0, -1.0)
    weight = torch.where(labels, desirable_weight, undesirable_weight)
    return weight * (1 - torch.sigmoid(sign * beta * (ratios.float() - kl)))


def kto_kl(mismatched_ratios: Tensor, reduce: Callable[[Tensor], Tensor] = lambda total: total) -> Tensor:
    """KTO's estimate of the KL to the reference, one number: max(0, mean log(policy / reference)) of responses to other
    prompts of the batch, without a gradient; 0 where there are none. `reduce` adds a tensor up over processes."""
    sums = reduce(torch.stack([mismatched_ratios.detach().double().sum(),
                               torch.tensor(float(len(mismatched_ratios)), dtype=torch.float64)]))
    return (sums[0] / sums[1].clamp(min=1)).clamp(min=0).float()


def best_and_worst(scores: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Rows (K,) of the highest and (K,) of the lowest score in each group that has two different scores.

    scores (B,), groups contiguous; NaN: not scored, never chosen. Ties go to the first row. A group whose scores are
    all equal is left out: it has no preference.
    """
    grouped = scores.view(-1, group_size)
    unknown, first = grouped.isnan(), torch.arange(len(scores), device=scores.device)[::group_size]
    best, worst = grouped.masked_fill(unknown, -math.inf).argmax(1), grouped.masked_fill(unknown, math.inf).argmin(1)
    differ = grouped.gather(1, best[:, None]) > grouped.gather(1, worst[:, None])  # of a group of NaN: false
    return (first + best)[differ[:, 0]], (first + worst)[differ[:, 0]]


def best_at_least(scores: Tensor, group_size: int, bar: float) -> Tensor:
    """Rows (K,) of the highest score in each group where it is not below `bar`; as `best_and_worst` otherwise."""
    grouped = scores.view(-1, group_size).nan_to_num(nan=-math.inf)
    best = torch.arange(len(scores), device=scores.device)[::group_size] + grouped.argmax(1)
    return best[scores[best] >= bar]


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Cross-entropy of a preference with logits (P,) where a share of the labels is assumed to be wrong."""
    if not label_smoothing:
        return -logsigmoid(logits)
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0 without cancellation; x is clamped to -1e-7, as x = 0 (a certain response) has -inf."""
    x = x.clamp(max=-1e-7)
    near = x > -math.log(2)
    # each branch gets only its own range: the other's infinite gradient times zero would be NaN
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))),
                       torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


class PreferenceLoss(NamedTuple):
    """fn: (chosen, rejected) -> (P,) where pairs are needed, else (ratios, labels, kl) -> (B,); settings by keyword.

    needs_reference: whether its inputs are log(policy / reference), or the policy's own. is_mean: whether they are
    averaged over a response's tokens, or summed. beta: the default.
    """

    fn: Callable[..., Tensor]
    needs_reference: bool
    needs_pairs: bool
    is_mean: bool
    beta: float


LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(dpo, needs_reference=True, needs_pairs=True, is_mean=False, beta=0.1),
    "ipo": PreferenceLoss(ipo, needs_reference=True, needs_pairs=True, is_mean=True, beta=0.1),
    "hinge": PreferenceLoss(hinge, needs_reference=True, needs_pairs=True, is_mean=False, beta=0.1),
    "kto": PreferenceLoss(kto, needs_reference=True, needs_pairs=False, is_mean=False, beta=0.1),
    "orpo": PreferenceLoss(orpo, needs_reference=False, needs_pairs=True, is_mean=True, beta=0.1),
    "simpo": PreferenceLoss(simpo, needs_reference=False, needs_pairs=True, is_mean=True, beta=2.0),
}
