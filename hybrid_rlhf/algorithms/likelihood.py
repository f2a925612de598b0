"""Log-probabilities of given tokens from hidden states, a chunk of tokens at a time.

The logits of a batch would be its largest tensor by far (64 x 512 tokens x vocabulary of 152k in fp32 is 20 GB). Here
they exist for one chunk only, in the forward pass and in the backward pass, which recomputes them, and in fp32 for one
block of its rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hybrid_rlhf.core.tensors import KeptSets, to_device

Scores = tuple[Tensor, Tensor | None, Tensor]
_BLOCK_NUMBERS = {"cpu": 1 << 19}  # 2 MiB in fp32, which fit into a CPU's cache
_BLOCK_ELSEWHERE = 1 << 25
_CHUNK_BYTES = 128 << 20


def chunk_rows(vocab_size: int, dtype: torch.dtype) -> int:
    """Rows of logits in a chunk of 128 MiB: the most that `token_logprobs` should have at once."""
    return max(1, _CHUNK_BYTES // (vocab_size * dtype.itemsize))


def token_logprobs(hidden: Tensor, targets: Tensor, head: Callable[[Tensor], Tensor], temperature: float = 1.0,
                   chunk_size: int = 1024, with_entropy: bool = False, num_chunks: int = 1,
                   score_logits: Callable[..., Scores] | None = None, kept: KeptSets | None = None) -> Scores:
    """(logprobs (N,) fp32, entropy (N,) fp32 in nats or None, correct (N,) bool) of `targets` under `head`.

    hidden (N, H): the states that predict targets (N,) long. head: hidden rows (n, H) -> logits (n, V), n up to
    chunk_size. The distribution is softmax(logits / temperature), taken in fp32; correct marks the targets that are
    its most likely token. Logprobs and entropy are differentiable; N = 0 gives empty vectors that are still connected
    to hidden and head. num_chunks: least number of calls of head, if each call is a collective.
    score_logits(logits, targets, temperature, with_entropy): the same of a chunk of logits (None: by torch).
    kept: the candidate tokens of each target, over which the softmax is taken (None: all). Raises ValueError for
    different lengths, and for a temperature or chunk_size that is not positive.
    """
    return token_logprobs_and(None, (), hidden, targets, head, temperature, chunk_size, with_entropy, num_chunks,
                              score_logits, kept)[0]


def token_logprobs_and(measure: Callable[..., tuple[Tensor, ...]] | None, beside: Sequence[Tensor], hidden: Tensor,
                       targets: Tensor, head: Callable[[Tensor], Tensor], temperature: float = 1.0,
                       chunk_size: int = 1024, with_entropy: bool = False, num_chunks: int = 1,
                       score_logits: Callable[..., Scores] | None = None,
                       kept: KeptSets | None = None) -> tuple[Scores, tuple[Tensor, ...]]:
    """`token_logprobs`, and further results of the same logits.

    measure(logits of a chunk (n, V), the chunk's part of each tensor of beside (N, ..)) -> tensors (n, ..), which come
    back as (N, ..). It is called again in a backward pass that recomputes, and gets the logits of all tokens.
    """
    counts = [*map(len, (targets, *beside)), *([] if kept is None else [sum(map(len, kept.sizes))])]
    if any(count != len(hidden) for count in counts):
        raise ValueError(f"{len(hidden)} hidden states for {', '.join(map(str, counts))} targets")
    if not temperature > 0 or chunk_size < 1:
        raise ValueError(f"temperature {temperature} and chunk_size {chunk_size} must be positive")

    def score(words: tuple[Tensor, Tensor] | None, rows: Tensor, ids: Tensor, *others: Tensor) -> tuple:
        logits = head(rows)
        scores = (score_logits or _Score.apply)(logits if words is None else _among(logits, *words), ids, temperature,
                                                with_entropy)
        return *scores, *(measure(logits, *others) if measure else ())

    tensors = hidden, targets, *beside
    sets = repeat(None) if kept is None else kept.chunks(chunk_size)
    chunks: list[tuple] = [(words, *parts) for words, *parts in zip(
        sets, *(tensor.split(chunk_size) for tensor in tensors), strict=False)]  # checked above
    chunks += [(None, *(tensor[:0] for tensor in tensors))] * (num_chunks - len(chunks))
    if len(chunks) > 1 and torch.is_grad_enabled():  # one chunk alone is kept, not recomputed
        scored = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        scored = [score(*chunk) for chunk in chunks]
    logprobs, entropy, correct, *measured = zip(*scored, strict=True)
    scores = torch.cat(logprobs), torch.cat(entropy) if with_entropy else None, torch.cat(correct)
    return scores, tuple(torch.cat(chunks) for chunks in measured)


def _among(logits: Tensor, ids: Tensor, sizes: Tensor) -> Tensor:
    """logits (n, V), -inf at all but each row's candidate tokens. ids (M,) and sizes (n,), on the host: the candidates
    of all rows, and how many each row has. ValueError for tokens outside the logits."""
    if len(ids) and int(ids.max()) >= logits.shape[1]:
        raise ValueError(f"candidate token {int(ids.max())} is outside of {logits.shape[1]} logits")
    places = torch.arange(len(sizes)).repeat_interleave(sizes) * logits.shape[1] + ids
    is_cut = torch.ones(logits.numel(), dtype=torch.bool, device=logits.device)
    is_cut.index_fill_(0, to_device(places, logits.device), False)
    return logits.masked_fill(is_cut.view(logits.shape), float("-inf"))


class _Score(torch.autograd.Function):
    """logits (n, V) -> logprobs, entropy and correct (n,) each, and the gradient of the first two.

    Saved for the backward pass: the logits in their own dtype, one log-normaliser and one entropy per row. The fp32
    values exist for a block of rows, in buffers that every block reuses. With p = softmax(logits / T):
    d logprob / d logits_j = (1[j = target] - p_j) / T and d entropy / d logits_j = -p_j (log p_j + entropy) / T.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float,
                with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, normaliser, entropy = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(3))
        correct = torch.empty_like(targets, dtype=torch.bool)
        spare, other = (logits.new_empty(0, dtype=torch.float32) for _ in range(2))
        for rows in _blocks(logits):
            x = _scaled(logits[rows], temperature, spare)
            highest, best = x.max(-1)
            correct[rows] = best == targets[rows]
            chosen = x.gather(-1, targets[rows, None])[:, 0] - highest
            x -= highest[:, None]
            if with_entropy:  # log z - sum_j p_j x_j; a logit of -inf adds 0, not the NaN of 0 * -inf
                p = torch.exp(x, out=other.resize_(x.shape))  # allocation would cost more than the computation
                z = p.sum(-1)
                entropy[rows] = z.log() - p.mul_(x.clamp_(min=-1e30)).sum(-1) / z
            else:
                z = x.exp_().sum(-1)
            logprobs[rows] = chosen - z.log()
            normaliser[rows] = highest + z.log()
        ctx.save_for_backward(logits, targets, normaliser, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(correct)
        return logprobs, entropy, correct

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor | None, by_entropy: Tensor | None,
                 _correct: None) -> tuple[Tensor, None, None, None]:
        logits, targets, normaliser, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        spare, other = (logits.new_empty(0, dtype=torch.float32) for _ in range(2))
        by_logprobs = torch.zeros_like(normaliser) if by_logprobs is None else by_logprobs / ctx.temperature
        for rows in _blocks(logits):
            x = _scaled(logits[rows], ctx.temperature, spare).sub_(normaliser[rows, None])  # log p
            factor = -by_logprobs[rows, None]
            if by_entropy is None:
                x.exp_().mul_(factor)
            else:
                p = torch.exp(x, out=other.resize_(x.shape))
                x.clamp_(min=-1e30).add_(entropy[rows, None]).mul_(by_entropy[rows, None] / -ctx.temperature)
                x.add_(factor).mul_(p)
            x.scatter_add_(-1, targets[rows, None], -factor)
            gradient[rows] = x
        return gradient, None, None, None


def imitation_loss(logprobs: Tensor, correct: Tensor, *, denominator: Tensor | float) -> tuple[Tensor, dict]:
    """Cross-entropy of these tokens as a share of `denominator` tokens, and its metrics: {name: (mean, count)}.

    logprobs (N,); correct (N,) bool, whether the token was the likeliest.
    """
    size = logprobs.numel()
    observed = {} if not size else {"loss": (-logprobs.detach().mean(), size),
                                    "mean_token_accuracy": (correct.float().mean(), size)}
    return -logprobs.sum() / denominator, observed


def _blocks(logits: Tensor, device_type: str | None = None) -> Iterator[slice]:
    """Blocks of rows whose fp32 copy is small."""
    size = max(1, _BLOCK_NUMBERS.get(device_type or logits.device.type, _BLOCK_ELSEWHERE) // logits.shape[1])
    yield from (slice(start, start + size) for start in range(0, len(logits), size))


def _scaled(logits: Tensor, temperature: float, spare: Tensor) -> Tensor:
    """logits / temperature in fp32, written into `spare`, which grows as needed."""
    x = spare.resize_(logits.shape).copy_(logits)
    return x if temperature == 1.0 else x.div_(temperature)
