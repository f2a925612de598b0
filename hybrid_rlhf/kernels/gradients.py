"""Compiled operations with gradients: autograd functions around a kernel's forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable


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
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            return CausalAttention.apply(query, key, value, scaling)
        return kernels.causal_attention(query, key, value, scaling=scaling)[0]

    return causal_attention
