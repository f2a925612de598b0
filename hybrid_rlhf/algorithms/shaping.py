"""From a score of a whole response to a reward for each token (1909.08593, 2203.02155)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.tensors import last_true


def normalise(scores: Tensor, mean: float, std: float) -> Tensor:
    """(B,) scores on the scale where the reference responses have mean 0 and standard deviation 1."""
    return (scores - mean) / std


def missing_eos(scores: Tensor, has_eos: Tensor, penalty: float) -> Tensor:
    """(B,) scores, less `penalty` where the response did not end by itself (has_eos (B,) bool)."""
    return torch.where(has_eos, scores, scores - penalty)


def shape_rewards(scores: Tensor, kl: Tensor, kl_coef: float, action_mask: Tensor) -> Tensor:
    """(B, R): -kl_coef * kl at every action, plus the sequence's score at its last action; zero at padding.

    scores (B,), kl (B, R) in nats, action_mask (B, R) bool. A row without any action gets no score.
    """
    rewards = (-kl_coef * kl.float()).masked_fill(~action_mask, 0)
    last = last_true(action_mask)
    rows = torch.arange(len(scores), device=scores.device)[last >= 0]
    rewards[rows, last[rows]] += scores.float()[rows]
    return rewards
