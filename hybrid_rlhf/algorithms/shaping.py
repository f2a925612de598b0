"""Reward shaping: from the score of a response to the reward of each of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.core.tensors import last_true


def shape_rewards(scores: Tensor, kl: Tensor, kl_coef: float, action_mask: Tensor,
                  token_scores: Tensor | None = None) -> Tensor:
    """Rewards (B, R): -kl_coef * kl at every action, and the score at the last one (arXiv 1909.08593, 2203.02155).

    scores (B,); kl (B, R) nats; action_mask (B, R) bool. Zero outside the actions, whatever `kl` is there; a row
    without an action has reward 0. token_scores (B, R): the part of the scores that belongs to single actions, such as
    the end of a turn; the rest stands at the last one.
    """
    if token_scores is not None:
        token_scores = token_scores.float().masked_fill(~action_mask, 0)
        scores = scores - token_scores.sum(1)
    columns = torch.arange(action_mask.shape[1], device=action_mask.device)
    is_last = columns[None, :] == last_true(action_mask)[:, None]
    penalty = (-kl_coef * kl.float()).masked_fill(~action_mask, 0)
    rewards = penalty + torch.where(is_last, scores.float()[:, None], 0.0)
    return rewards if token_scores is None else rewards + token_scores


def normalise(scores: Tensor, mean: float, std: float) -> Tensor:
    """Scores (B,) on a scale of mean 0 and std 1, by the statistics that stage 2 measured.

    Raises ValueError if std is not positive: a source whose scores are all equal cannot be normalised.
    """
    if not std > 0:
        raise ValueError(f"scores cannot be normalised by a standard deviation of {std}")
    return (scores.float() - mean) / std


def missing_eos(scores: Tensor, has_eos: Tensor, penalty: float) -> Tensor:
    """Scores (B,), less `penalty` where the response did not end by itself. has_eos (B,) bool."""
    return scores.float() - penalty * (~has_eos).float()


def overlong(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13) of responses of `lengths` (B,) tokens, in [-1, 0].

    0 up to max_length - buffer, then linearly down to -1 at max_length. Raises ValueError for a buffer
    that is not in [1, max_length].
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong buffer {buffer}: it must lie in [1, {max_length}]")
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1, 0)
