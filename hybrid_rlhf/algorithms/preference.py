"""Losses on preferences: one function per loss, from what was chosen and what was rejected to one number per pair."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


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
