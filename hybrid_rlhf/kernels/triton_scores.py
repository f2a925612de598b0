"""Log-probabilities and entropies of tokens from logits in Triton, forward and backward, for kernels/gradients.py:
token_scores_by. Their definition is token_scores in kernels/reference.py; kernels/cuda.py first compares them with it.

The forward reads a row once, a block at a time, with the largest number so far and the sums, which are rescaled
whenever a larger one comes (online softmax, 1805.02867). The backward writes the gradient in the dtype of the logits.
With p = softmax(logits / T): d logprob / d logits_j = (1[j = target] - p_j) / T and d entropy / d logits_j =
-p_j (log p_j + entropy) / T.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 4096, 8  # numbers of a row that a program reads together
_LOW = tl.constexpr(-1e30)  # in place of -inf: such a token adds 0, not the NaN of 0 * -inf


@triton.jit
def _scaled(row, tokens, inside, temperature, outside, TEMPERED: tl.constexpr):
    """The logits of these tokens over the temperature, in fp32."""
    x = tl.load(row + tokens, mask=inside, other=outside).to(tl.float32)
    if TEMPERED:
        x = tl.div_rn(x, temperature)
    return x


@triton.jit
def _at_least_low(x):
    return tl.where(x < _LOW, _LOW, x)


@triton.jit
def _score(logits, targets, logprobs, entropy, correct, normalisers, num_tokens, logits_n, temperature,
           TEMPERED: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows,). A target outside of the vocabulary gives NaN, and so does its gradient."""
    n = tl.program_id(0).to(tl.int64)
    row, target = logits + n * logits_n, tl.load(targets + n)
    is_token = (target >= 0) & (target < num_tokens)
    chosen = _scaled(row, target, is_token, temperature, float("nan"), TEMPERED)
    chosen_rank = tl.where(chosen == chosen, chosen, float("inf"))  # NaN is the largest, as in torch
    most = tl.full((), float("-inf"), tl.float32)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, num_tokens, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = _scaled(row, tokens, tokens < num_tokens, temperature, float("-inf"), TEMPERED)
        rank = tl.where(x == x, x, float("inf"))
        above |= ((rank > chosen_rank) | ((rank == chosen_rank) & (tokens < target))).to(tl.int32)
        top = tl.maximum(most, tl.max(x, 0))
        shift = tl.where(most == float("-inf"), 0.0, _at_least_low(most - top))  # sums are 0 where there was no number
        centred = x - tl.where(top == float("-inf"), 0.0, top)
        power, scale = tl.exp(centred), tl.exp(shift)
        if WITH_ENTROPY:
            weighted = (weighted + total * shift) * scale + power * _at_least_low(centred)
        total = total * scale + power
        most = top
    z = tl.sum(total, 0)
    most, log_z = tl.where(most == float("-inf"), 0.0, most), tl.log(z)
    tl.store(logprobs + n, (chosen - most) - log_z)
    tl.store(normalisers + n, tl.where(is_token, most + log_z, float("nan")))
    tl.store(correct + n, is_token & (tl.max(above, 0) == 0))
    if WITH_ENTROPY:
        tl.store(entropy + n, log_z - tl.sum(weighted, 0) / z)


@triton.jit
def _score_backward(logits, targets, normalisers, entropy, by_logprobs, by_entropy, gradient, num_tokens, logits_n,
                    temperature, TEMPERED: tl.constexpr, BY_LOGPROBS: tl.constexpr, BY_ENTROPY: tl.constexpr,
                    BLOCK: tl.constexpr):
    """Grid (rows, blocks of a row). gradient: dense."""
    n = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    x = _scaled(logits + n * logits_n, tokens, inside, temperature, float("-inf"), TEMPERED)
    logprob = x - tl.load(normalisers + n)
    factor, at_target = tl.zeros((BLOCK,), tl.float32), 0.0
    if BY_LOGPROBS:
        at_target = tl.div_rn(tl.load(by_logprobs + n), temperature)
        factor -= at_target
    if BY_ENTROPY:
        by = tl.div_rn(tl.load(by_entropy + n), temperature)
        factor -= by * (_at_least_low(logprob) + tl.load(entropy + n))
    slope = tl.exp(logprob) * factor + tl.where(tokens == tl.load(targets + n), at_target, 0.0)
    tl.store(gradient + n * num_tokens + tokens, slope.to(gradient.dtype.element_ty), mask=inside)


def token_scores(logits: Tensor, targets: Tensor, temperature: float,
                 with_entropy: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """kernels/reference.py: token_scores of rows with a dense last dimension, and the log-normaliser of each row.

    entropy is empty without with_entropy. A target outside of the vocabulary gives NaN, as an error would have to wait
    for the device.
    """
    rows, targets = len(logits), targets.contiguous()
    logprobs, normalisers = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    entropy = logits.new_empty(rows if with_entropy else 0, dtype=torch.float32)
    correct = logits.new_empty(rows, dtype=torch.bool)
    if rows:
        _score[(rows,)](logits, targets, logprobs, entropy if with_entropy else logprobs, correct, normalisers,
                        logits.shape[1], logits.stride(0), float(temperature), TEMPERED=temperature != 1,
                        WITH_ENTROPY=with_entropy, BLOCK=_BLOCK, num_warps=_WARPS)
    return logprobs, entropy, correct, normalisers


def token_scores_backward(logits: Tensor, targets: Tensor, normalisers: Tensor, entropy: Tensor,
                          by_logprobs: Tensor | None, by_entropy: Tensor | None, temperature: float) -> Tensor:
    """The gradient by the logits, dense and of their dtype, from the inputs and outputs of `token_scores`."""
    rows, num_tokens = logits.shape
    gradient = logits.new_empty(rows, num_tokens)
    by = [normalisers if x is None else x.contiguous() for x in (by_logprobs, by_entropy)]
    if rows:
        _score_backward[rows, triton.cdiv(num_tokens, _BLOCK)](
            logits, targets.contiguous(), normalisers, normalisers if by_entropy is None else entropy, *by, gradient,
            num_tokens, logits.stride(0), float(temperature), TEMPERED=temperature != 1,
            BY_LOGPROBS=by_logprobs is not None, BY_ENTROPY=by_entropy is not None, BLOCK=_BLOCK, num_warps=_WARPS)
    return gradient
