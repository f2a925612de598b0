"""Quantised layers for counting: what a plan runs in the place of bitsandbytes' layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from hybrid_rlhf.models.lora import plain_linear_layers


class _Dequantised(torch.autograd.Function):
    """x W^T of a frozen weight that is held in fewer bits: its numbers are there during the product only, forward and
    backward, as bitsandbytes has it."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, torch.empty_like(weight), bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ torch.empty_like(ctx.saved_tensors[0]), None, None


class Packed(nn.Linear):
    """A frozen linear layer in 4 or 8 bits; no nn.Linear by type, so that nothing is fused with it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Dequantised.apply(x, self.weight, self.bias)


def pack(model: nn.Module) -> None:
    """Let every frozen linear layer of `model` but its heads compute as a quantised one. In place."""
    names = set(plain_linear_layers(model))
    for name, module in model.named_modules():
        if name.removesuffix(".base_layer") in names and type(module) is nn.Linear:
            module.__class__ = Packed
