"""Losses on preference pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0) -> Tensor:
    """(P,): -log sigmoid(s_chosen - s_rejected - margin) + center_coef (s_chosen + s_rejected)^2.

    Bradley and Terry 1952 as in 2203.02155, equation 1; the margin as in Llama 2 (2307.09288, equation 2); the
    centering term from 2312.09244. All (P,), fp32.
    """
    chosen, rejected = chosen.float(), rejected.float()
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()
