"""Log-probabilities of given tokens and of the likeliest ones, from hidden states, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class TopTokens(NamedTuple):
    """Of N positions: logprobs (N,) fp32 of the given tokens; ids (N, k) long of the likeliest tokens, likeliest first,
    and their top_logprobs (N, k) fp32. A given token that is among them has the same number in both places."""

    logprobs: Tensor
    ids: Tensor
    top_logprobs: Tensor


@torch.no_grad()
def top_tokens(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], num_top: int,
               chunk_size: int = 1024) -> TopTokens:
    """What softmax(head(hidden)) says of `targets`, and its num_top likeliest tokens (all, where there are fewer).

    hidden (N, H): the states that predict targets (N,) long. head: hidden rows (n, H) -> logits (n, V) of any dtype, n
    up to chunk_size; the logits of one chunk exist at once, and their fp32 copy. N = 0 gives empty tensors. Raises
    ValueError for unlike lengths, a chunk_size that is not positive and a negative num_top.
    """
    if hidden.shape[0] != targets.shape[0]:
        raise ValueError(f"{hidden.shape[0]} hidden states for {targets.shape[0]} targets")
    if chunk_size < 1 or num_top < 0:
        raise ValueError(f"chunk_size {chunk_size} must be positive, num_top {num_top} 0 or more")
    parts = [_of_logits(head(rows), ids, num_top)
             for rows, ids in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)]
    return TopTokens(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _of_logits(logits: Tensor, targets: Tensor, num_top: int) -> TopTokens:
    x = logits.float()
    x = x - x.logsumexp(-1, keepdim=True)
    top, ids = x.topk(min(num_top, x.shape[1]), dim=-1)
    return TopTokens(x.gather(-1, targets[:, None])[:, 0], ids, top)
