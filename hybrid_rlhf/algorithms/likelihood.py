"""Log-probabilities of given tokens from hidden states, a chunk of tokens at a time.

Logits of a whole batch are its largest tensor by far (64 x 512 tokens x 152k words in fp32 are 20 GB). Here they exist
for one chunk only, in the forward pass as in the backward pass, where each chunk's are computed again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Scores = tuple[Tensor, Tensor | None, Tensor]


def token_logprobs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], temperature: float = 1.0,
                   chunk_size: int = 1024, with_entropy: bool = False) -> Scores:
    """(logprobs (N,) fp32, entropy (N,) fp32 in nats or None, correct (N,) bool) of `targets` under `head`.

    hidden (N, H): the states that predict targets (N,) long. head: hidden rows (n, H) -> logits (n, V), n up to
    chunk_size. The distribution is softmax(logits / temperature), taken in fp32; correct marks the targets that are
    its most likely token. Logprobs and entropy are differentiable; N = 0 gives empty vectors that still lead back to
    hidden and head. Raises ValueError for unlike lengths, and for a temperature or chunk_size that is not positive.
    """
    if hidden.shape[0] != targets.shape[0]:
        raise ValueError(f"{hidden.shape[0]} hidden states for {targets.shape[0]} targets")
    if not temperature > 0 or chunk_size < 1:
        raise ValueError(f"temperature {temperature} and chunk_size {chunk_size} must be positive")

    def score(rows: Tensor, ids: Tensor) -> Scores:
        return _score_chunk(head(rows), ids, temperature, with_entropy)

    chunks = list(zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True))
    if len(chunks) > 1 and torch.is_grad_enabled():  # one chunk is the bound itself: keeping it spares the second pass
        scored = [checkpoint(score, rows, ids, use_reentrant=False) for rows, ids in chunks]
    else:
        scored = [score(rows, ids) for rows, ids in chunks]
    logprobs, entropy, correct = zip(*scored, strict=True)
    return torch.cat(logprobs), torch.cat(entropy) if with_entropy else None, torch.cat(correct)


def _score_chunk(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> Scores:
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    correct = logits.detach().argmax(-1) == targets
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    normaliser = logits.logsumexp(-1)
    if not with_entropy:
        return chosen - normaliser, None, correct
    logprobs = logits - normaliser[:, None]
    # A word ruled out by a logit of -inf adds 0, not the NaN of 0 * -inf.
    entropy = -(logprobs.exp() * logprobs.masked_fill(logprobs == -torch.inf, 0)).sum(-1)
    return chosen - normaliser, entropy, correct
