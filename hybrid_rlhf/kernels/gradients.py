"""Compiled operations with gradients: autograd functions around a kernel's forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.ops import Fused

_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))  # of the kernels' inputs


def causal_attention_by(kernels: ModuleType) -> Callable:
    """kernels/reference.py: causal_attention(query, key, value, *, scaling) by the compiled `kernels`, with gradients.

    Kept for the backward pass: the three inputs and one fp32 number per query and head.
    """

    class CausalAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
            out, normalisers = kernels.causal_attention(query, key, value, scaling=scaling, with_normalisers=True)
            ctx.save_for_backward(query, key, value, normalisers)
            ctx.scaling = scaling
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
            query, key, value, normalisers = ctx.saved_tensors
            return *kernels.causal_attention_backward(gradient, query, key, value, normalisers,
                                                      scaling=ctx.scaling), None

    def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        if _is_recorded(query, key, value):
            return CausalAttention.apply(query, key, value, scaling)
        return kernels.causal_attention(query, key, value, scaling=scaling)[0]

    return causal_attention


def token_scores_by(kernels: ModuleType) -> Callable:
    """kernels/reference.py: token_scores by the compiled `kernels`, with gradients.

    Kept for the backward pass: the logits in their own dtype, one log-normaliser and one entropy per row.
    """

    class TokenScores(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, logits: Tensor, targets: Tensor, temperature: float,
                    with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
            logits = logits if logits.shape[1] <= 1 or logits.stride(1) == 1 else logits.contiguous()
            logprobs, entropy, correct, normalisers = kernels.token_scores(logits, targets, temperature, with_entropy)
            ctx.save_for_backward(logits, targets, normalisers, entropy)
            ctx.temperature = temperature
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(correct)
            return logprobs, entropy, correct

        @staticmethod
        @once_differentiable
        def backward(ctx: FunctionCtx, by_logprobs: Tensor | None, by_entropy: Tensor | None,
                     _correct: None) -> tuple[Tensor | None, ...]:
            by_entropy = None if by_entropy is not None and not by_entropy.numel() else by_entropy
            by_logits = kernels.token_scores_backward(*ctx.saved_tensors, by_logprobs, by_entropy, ctx.temperature)
            return by_logits, None, None, None

    def token_scores(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool,
                     ) -> tuple[Tensor, Tensor | None, Tensor]:
        if logits.dtype not in _DTYPES:
            return reference.token_scores(logits, targets, temperature, with_entropy)
        logprobs, entropy, correct = TokenScores.apply(logits, targets, temperature, with_entropy)
        return logprobs, entropy if with_entropy else None, correct

    return token_scores


def fused_by(kernels: ModuleType) -> Fused:
    """rms_norm, gated and rotary of kernels/reference.py by the compiled `kernels`, with gradients.

    Kept for the backward pass: the inputs of each, and nothing in fp32.
    """
    return Fused(_rms_norm(kernels), _gated(kernels), _rotary(kernels))


def _is_recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _rms_norm(kernels: ModuleType) -> Callable:
    class RMSNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float, adds_one: bool) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.settings = eps, adds_one
            return kernels.rms_norm(x, weight, eps, adds_one)

        @staticmethod
        @once_differentiable
        def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
            by_x, by_weight = kernels.rms_norm_backward(gradient, *ctx.saved_tensors, *ctx.settings,
                                                        ctx.needs_input_grad[1])
            return by_x, by_weight, None, None

    def rms_norm(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> Tensor:
        if _is_recorded(x, weight):
            return RMSNorm.apply(x, weight, eps, adds_one)
        return kernels.rms_norm(x, weight, eps, adds_one)

    return rms_norm


def _gated(kernels: ModuleType) -> Callable:
    class Gated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
            ctx.save_for_backward(gate, up)
            ctx.is_gelu = is_gelu
            return kernels.gated(gate, up, is_gelu)

        @staticmethod
        @once_differentiable
        def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
            return *kernels.gated_backward(gradient, *ctx.saved_tensors, ctx.is_gelu), None

    def gated(gate: Tensor, up: Tensor, is_gelu: bool = False) -> Tensor:
        return Gated.apply(gate, up, is_gelu) if _is_recorded(gate, up) else kernels.gated(gate, up, is_gelu)

    return gated


def _rotary(kernels: ModuleType) -> Callable:
    class Rotary(torch.autograd.Function):
        @staticmethod
        def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor):  # noqa: ANN205
            ctx.save_for_backward(cosines, sines)
            return kernels.rotary(query, key, cosines, sines)

        @staticmethod
        @once_differentiable
        def backward(ctx: FunctionCtx, by_query: Tensor, by_key: Tensor) -> tuple[Tensor | None, ...]:
            cosines, sines = ctx.saved_tensors  # the inverse rotation: the transposed matrix of each pair
            back = -sines.roll(sines.shape[-1] // 2, -1)
            return *kernels.rotary(by_query, by_key, cosines, back), None, None

    def rotary(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        if _is_recorded(query, key):
            return Rotary.apply(query, key, cosines, sines)
        return kernels.rotary(query, key, cosines, sines)

    return rotary
