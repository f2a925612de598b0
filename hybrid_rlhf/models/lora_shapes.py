"""Adapters for counting: the layers that peft makes, for a plan that has no second to import peft.

Their memory is peft's: the same parameters, and a forward of the same operations (peft/tuners/lora/layer.py).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from hybrid_rlhf.models.lora import LoraConfig, adapter_dtype, expert_weights, plain_linear_layers


class _Adapted(nn.Module):
    """A linear layer with an adapter, as peft's lora.Linear."""

    fan_in_fan_out = merged = disable_adapters = False

    def __init__(self, base: nn.Linear, config: LoraConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters, self.lora_variant = base, {_NAME: 1.0}, [_NAME], {}
        named = {"bias": False, "dtype": dtype}
        self.lora_A = nn.ModuleDict({_NAME: nn.Linear(base.in_features, config.r, **named)})
        self.lora_B = nn.ModuleDict({_NAME: nn.Linear(config.r, base.out_features, **named)})
        self.lora_dropout = nn.ModuleDict({_NAME: nn.Dropout(config.dropout) if config.dropout else nn.Identity()})

    @property
    def weight(self) -> Tensor:
        is_packed = type(self.base_layer) is not nn.Linear  # numbers that are no weights: nothing is fused with them
        return torch.empty(0, dtype=torch.uint8, device="meta") if is_packed else self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        out, down = self.base_layer(x), self.lora_A[_NAME]
        inner = self.lora_dropout[_NAME](x.to(down.weight.dtype))
        return (out + self.lora_B[_NAME](down(inner)) * self.scaling[_NAME]).to(out.dtype)


_NAME = "default"


def add_empty_adapters(model: nn.Module, config: LoraConfig) -> bool:
    """Freeze `model` and put adapters beside its linear layers, in place, on the device in use; False, and nothing is
    done, where they are of another kind (experts, convolutions, embeddings) or none matches: peft's to tell."""
    wanted, linear = config.target_modules, plain_linear_layers(model)
    if wanted == "all-linear":
        names = linear
    elif isinstance(wanted, str):
        names = [n for n, _ in model.named_modules() if re.fullmatch(wanted, n)]
    else:
        names = [n for n, _ in model.named_modules() if any(n == w or n.endswith(f".{w}") for w in wanted)]
    modules = dict(model.named_modules())
    has_others = any(type(m).__name__ == "Conv1D" for m in modules.values()) or expert_weights(model)
    if has_others or not names or any(type(modules[n]) is not nn.Linear or n not in linear for n in names):
        return False
    model.requires_grad_(False)
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(modules[parent], own, _Adapted(modules[name], config, adapter_dtype(model)))
    return True


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


class _Packed(nn.Linear):
    """A frozen linear layer in 4 or 8 bits; no nn.Linear by type, so that nothing is fused with it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Dequantised.apply(x, self.weight, self.bias)


def pack(model: nn.Module) -> None:
    """Let every frozen linear layer of `model` but its heads compute as a quantised one. In place."""
    names = set(plain_linear_layers(model))
    for name, module in model.named_modules():
        if name.removesuffix(".base_layer") in names and type(module) is nn.Linear:
            module.__class__ = _Packed
