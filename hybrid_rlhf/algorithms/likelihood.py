"""Log-probabilities of given tokens from hidden states, by chunks: logits are never whole, forward or backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]


def token_logprobs(hidden: Tensor, targets: Tensor, head: Head, *, temperature: float = 1.0, chunk_size: int = 1024,
                   with_entropy: bool = False) -> tuple[Tensor, Tensor | None, Tensor]:
    """Log-probability of each target under softmax(head(hidden) / temperature).

    hidden (N, H), targets (N,) long, head: (n, H) -> (n, V). Returns logprobs (N,) fp32, entropy (N,) fp32 in nats or
    None, and correct (N,) bool, whether the target is the likeliest token. At most chunk_size rows of logits exist at
    a time; with gradients each chunk is recomputed in the backward pass.
    """
    parts = []
    for rows, wanted in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
        if torch.is_grad_enabled() and rows.requires_grad:
            parts.append(checkpoint(_chunk, rows, wanted, head, temperature, with_entropy, use_reentrant=False))
        else:
            parts.append(_chunk(rows, wanted, head, temperature, with_entropy))
    logprobs, entropy, correct = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropy if with_entropy else None, correct


def _chunk(hidden: Tensor, targets: Tensor, head: Head, temperature: float, with_entropy: bool
           ) -> tuple[Tensor, Tensor, Tensor]:
    if not len(targets):  # a head need not know how to do nothing; the sum keeps the graph whole
        nothing = hidden.float().sum(1)
        return nothing, nothing.detach(), targets.bool()
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - normaliser
    correct = logits.argmax(1) == targets
    entropy = normaliser - (logits.softmax(1) * logits).sum(1) if with_entropy else logprobs.detach()
    return logprobs, entropy, correct
