"""A linear layer and its low-rank adapter as one operation of three products, without memory passes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from hybrid_rlhf.core.torch_compat import is_hooked
from hybrid_rlhf.models.quantize import AdaptedPackedLinear

_FEW_ROWS = 48  # as a decode step has


class AdaptedLinear(torch.autograd.Function):
    """x (N, in) -> x W^T + bias + scaling (x A^T) B^T, with gradients for x, A (r, in) and B (out, r); W is frozen.

    peft runs scaling and sum as separate operations over (N, out), forward and backward; here both are fused into the
    products. Saved for the backward pass: x and x A^T.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor,
                scaling: float) -> Tensor:
        low = x @ down.T
        ctx.save_for_backward(x, low, weight, down, up)
        ctx.scaling = scaling
        return F.linear(x, weight, bias).addmm_(low, up.T, alpha=scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, down, up = ctx.saved_tensors
        by_low = (gradient @ up).mul_(ctx.scaling)
        by_x = (gradient @ weight).addmm_(by_low, down) if ctx.needs_input_grad[0] else None
        by_down = by_low.T @ x if ctx.needs_input_grad[3] else None
        by_up = (gradient.T @ low).mul_(ctx.scaling) if ctx.needs_input_grad[4] else None
        return by_x, None, None, by_down, by_up, None


@contextmanager
def fused_adapters(model: nn.Module, product: Callable | None = None,
                   dtypes: frozenset[torch.dtype] = frozenset()) -> Iterator[int]:
    """Within the block plain adapters of `model` (peft's, over a frozen nn.Linear) run as AdaptedLinear, those over a
    weight in 4 or 8 bits as AdaptedPackedLinear; yields the number of layers. Any other call (merged, several adapters
    at once, dropout, mixed dtypes) runs peft's code. product(x, weight, bias, down, up, scaling): the same for few rows
    of `dtypes` on a CPU, without gradients.
    """
    layers = [m for m in model.modules() if _may_be_fused(m)]
    for layer in layers:
        is_taken = product and layer.base_layer.weight.dtype in dtypes and layer.base_layer.weight.device.type == "cpu"
        layer.forward = _forward(layer, product if is_taken else None)
    try:
        yield len(layers)
    finally:
        for layer in layers:
            del layer.forward


def plain_adapter(layer: nn.Module, dtype: torch.dtype) -> tuple[str, tuple[Tensor, Tensor, float]] | None:
    """The name of the only active adapter of a frozen linear layer, quantised or not, and its A (r, in), B (out, r) and
    scaling in `dtype`; None where a call computes anything else than W x + b + scaling B A x."""
    return _active(layer, _adapters(layer), dtype) if _has_plain_parts(layer) else None


def is_only_adapter(layer: nn.Module, name: str) -> bool:
    """Whether a call adds this adapter and no other."""
    return layer.active_adapters == [name] and not layer.disable_adapters and not layer.merged


def _may_be_fused(module: nn.Module) -> bool:
    return "forward" not in vars(module) and _has_plain_parts(module)


def _has_plain_parts(module: nn.Module) -> bool:
    base = getattr(module, "base_layer", None)
    return (hasattr(module, "lora_A") and (type(base) is nn.Linear or hasattr(base, "packed_weight"))
            and not is_hooked(module.base_layer)  # such as a head with rows of added tokens
            and not module.fan_in_fan_out and not module.lora_variant
            and all(type(m) is nn.Linear and m.bias is None for part in (module.lora_A, module.lora_B)
                    for m in part.values()))


def _adapters(layer: nn.Module) -> dict[str, tuple[Tensor, Tensor, nn.Module]]:
    """A, B and dropout of each adapter of a layer."""
    return {name: (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.lora_dropout[name])
            for name in layer.lora_A if name in layer.lora_B}


def _active(layer: nn.Module, adapters: dict, dtype: torch.dtype) -> tuple[str, tuple[Tensor, Tensor, float]] | None:
    """Name, A, B and scaling of the one of these adapters that a call adds in this dtype, without dropout; or None."""
    names = [n for n in layer.active_adapters if n in adapters]
    if len(names) != 1 or layer.disable_adapters or layer.merged:
        return None
    down, up, dropout = adapters[names[0]]
    if down.dtype != dtype or up.dtype != dtype or (dropout.training and getattr(dropout, "p", 0.0)):
        return None
    return names[0], (down, up, layer.scaling[names[0]])


def _forward(layer: nn.Module, product: Callable | None) -> Callable[..., Tensor]:
    base, adapters = layer.base_layer, _adapters(layer)
    original = layer.forward  # bound, of the class

    def forward(x: Tensor, *others: object, **named: object) -> Tensor:
        adapter = None if others or named or not _is_plain(x, base) else _active(layer, adapters, x.dtype)
        if adapter is None:
            return original(x, *others, **named)
        down, up, scaling = adapter[1]
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled() and hasattr(base, "packed_weight"):
            bias = None if base.bias is None else base.bias.to(x.dtype)
            out = AdaptedPackedLinear.apply(rows, base.packed_weight, bias, down, up, scaling)
        elif torch.is_grad_enabled():
            out = AdaptedLinear.apply(rows, base.weight, base.bias, down, up, scaling)
        elif product and len(rows) <= _FEW_ROWS:
            out = product(rows, base.weight, base.bias, down, up, scaling)
        else:
            out = base(rows).addmm_(F.linear(rows, down), up.T, alpha=scaling)
        return out.view(*x.shape[:-1], -1)

    return forward


def _is_plain(x: Tensor, base: nn.Linear) -> bool:
    weight = base.weight
    return ((hasattr(base, "packed_weight") or x.dtype == weight.dtype) and not weight.requires_grad
            and (base.bias is None or not base.bias.requires_grad) and x.numel() > 0
            and not torch.is_autocast_enabled(x.device.type))
