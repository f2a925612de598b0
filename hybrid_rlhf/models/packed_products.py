"""Products with frozen weights in 4 or 8 bits, with gradients for their inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F


class PackedWeight(Protocol):
    """A quantised weight W (out, in). Its methods are not recorded by autograd."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """W in `dtype`."""
        ...

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (.., in) -> x W^T + bias, a new tensor."""
        ...

    def back(self, gradient: Tensor) -> Tensor:
        """gradient (.., out) -> gradient W."""
        ...

    def sampled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`product` without gradients, in the fastest form."""
        ...


class Dequantised:
    """A weight that is dequantised for each product. fused(x, bias): the product on packed bytes, used for sampling
    while `is_sampling` is set; None where there is none."""

    def __init__(self, dequantised: Callable[[torch.dtype], Tensor]) -> None:
        self.dequantised = dequantised
        self.fused: Callable[[Tensor, Tensor | None], Tensor] | None = None
        self.is_sampling = False

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantised(x.dtype), bias)

    def back(self, gradient: Tensor) -> Tensor:
        return gradient @ self.dequantised(gradient.dtype)

    def sampled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.fused(x, bias) if self.fused and self.is_sampling else self.product(x, bias)


class RowScaled:
    """A weight of int8 values (out, in), each row of which has a factor (out,). Products are those of the values, which
    every floating dtype holds exactly, and the factors are applied to the outputs: the only copy of the weight is in
    the dtype of the product."""

    def __init__(self, parts: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._parts = parts
        largest = float(parts()[1].max())
        # values up to 127 may overflow float16 (65,504): a power of two scales them to the size of weights, exactly
        self._power = 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        values, factors = self._parts()
        return values.float().mul_(factors[:, None]).to(dtype)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values, factors = self._in(x.dtype)
        out = F.linear(x, values).mul_(factors)
        return out if bias is None else out.add_(bias)

    def back(self, gradient: Tensor) -> Tensor:
        values, factors = self._in(gradient.dtype)
        return torch.mul(gradient, factors, out=torch.empty_like(gradient)) @ values

    def sampled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.product(x, bias)

    def _in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The values in `dtype` and the rows' factors in fp32."""
        values, factors = self._parts()
        if dtype == torch.float16:
            return values.to(dtype).mul_(self._power), factors / self._power
        return values.to(dtype), factors


class PackedLinear(torch.autograd.Function):
    """x W^T + bias; only the packed weight is saved for the backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, bias: Tensor | None, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return weight.product(x, bias)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        into_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return ctx.weight.back(gradient) if ctx.needs_input_grad[0] else None, into_bias, None


class AdaptedPackedLinear(torch.autograd.Function):
    """x (N, in) -> x W^T + bias + scaling (x A^T) B^T, with gradients for x, A (r, in) and B (out, r): as
    lora_products.AdaptedLinear, with a packed W. Saved for the backward pass: x and x A^T."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: PackedWeight, bias: Tensor | None, down: Tensor, up: Tensor,
                scaling: float) -> Tensor:
        low = x @ down.T
        ctx.save_for_backward(x, low, down, up)
        ctx.weight, ctx.scaling = weight, scaling
        return weight.product(x, bias).addmm_(low, up.T, alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, up = ctx.saved_tensors
        by_low = (gradient @ up).mul_(ctx.scaling)
        by_x = ctx.weight.back(gradient).addmm_(by_low, down) if ctx.needs_input_grad[0] else None
        by_down = by_low.T @ x if ctx.needs_input_grad[3] else None
        by_up = (gradient.T @ low).mul_(ctx.scaling) if ctx.needs_input_grad[4] else None
        return by_x, None, None, by_down, by_up, None
