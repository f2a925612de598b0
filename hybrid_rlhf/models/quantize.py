"""Frozen weights in 4 or 8 bits, and an optimizer whose moments take 8. The only module that imports bitsandbytes and
reaches into its private parts.

Sources: QLoRA, arXiv 2305.14314 (NF4 in blocks of 64); 8-bit optimizers, arXiv 2110.02861.

Products are always those of the dequantised weight in the activations' dtype, the same in training, evaluation and
generation. bitsandbytes' own ways are not taken, because in them the modes differ: on CPUs with AVX512-BF16 its 4-bit
layers repack their bytes at the first call in eval mode, multiply in bf16 from then on and pass no gradient through
(0.50.2), and its 8-bit product rounds activations with a threshold that depends on the other rows of the batch.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_rlhf.core.compat import Dependency
from hybrid_rlhf.core.config import UserError

BITSANDBYTES = Dependency("bitsandbytes", checked="0.50.2")
SETTINGS = {"4bit": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "8bit": dict(load_in_8bit=True)}


def require(what: str) -> None:
    """UserError unless bitsandbytes is installed; `what` is the option that needs it. Imports nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{what} needs bitsandbytes, which is not installed: pip install 'hybrid-rlhf[quantize]'")


def _bitsandbytes() -> ModuleType:
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # on kernels that are not used here
    import bitsandbytes

    return bitsandbytes


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` whose weight is held in 4 or 8 bits, by name."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "_dequantised")}


def settle(model: nn.Module, source: str) -> nn.Module:
    """Make the quantised layers of a model that transformers just loaded from `source` multiply by the dequantised
    weight, in place.

    Raises RuntimeError if there are none.
    """
    model.quantised_from = source
    bnb = _bitsandbytes()
    found = 0
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            BITSANDBYTES.require(module, "support_avx512bf16_for_cpu")
            module.support_avx512bf16_for_cpu = False
            module._dequantised = MethodType(_dequantised_4bit, module)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            module._dequantised = MethodType(_dequantised_8bit, module)
        else:
            continue
        found += 1
        module.forward = MethodType(_forward, module)
    if not found:
        raise RuntimeError(f"{type(model).__name__} has no linear layer that could be quantised")
    return model


def dequantised(layer: nn.Module) -> Tensor:
    """The weight of a linear layer, quantised or not, in fp32 (out, in)."""
    return (layer._dequantised(torch.float32) if hasattr(layer, "_dequantised") else layer.weight.detach()).float()


@contextmanager
def multiplying_by(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Within the block the quantised layers of `model` multiply by `weights` (name -> (out, in)) instead of their own:
    by those that were quantised, say."""
    layers = quantized_layers(model)
    before = {name: layer._dequantised for name, layer in layers.items()}
    for name, layer in layers.items():
        layer._dequantised = MethodType(lambda self, dtype, weight=weights[name]: weight.to(self.weight.device, dtype),
                                        layer)
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer._dequantised = before[name]


def _dequantised_4bit(self: nn.Module, dtype: torch.dtype) -> Tensor:
    state = self.weight.quant_state
    return _bitsandbytes().functional.dequantize_4bit(self.weight.data, state).to(dtype)


def _dequantised_8bit(self: nn.Module, dtype: torch.dtype) -> Tensor:
    """Row i is its int8 values times the row's largest magnitude over 127."""
    values = self.weight.CB if self.weight.CB is not None else self.state.CB
    scale = self.weight.SCB if self.weight.SCB is not None else self.state.SCB
    return (values.float() * (scale.float()[:, None] / 127.0)).to(dtype)


def _forward(self: nn.Module, x: Tensor) -> Tensor:
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return _Product.apply(x, bias, self)


class _Product(torch.autograd.Function):
    """x W^T + b with a frozen W that is dequantised in the forward and again in the backward, and kept in neither."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, layer: nn.Module) -> Tensor:  # noqa: ANN001
        ctx.layer = layer
        return F.linear(x, layer._dequantised(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # noqa: ANN001
        into_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad @ ctx.layer._dequantised(grad.dtype) if ctx.needs_input_grad[0] else None, into_bias, None


def unpacked_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` but for what its quantised layers hold packed: their weights and scales."""
    inside = tuple(f"{name}.{part}" for name in quantized_layers(model) for part in ("weight", "SCB"))
    return {k: v for k, v in model.state_dict().items() if not (inside and k.startswith(inside))}


def adamw_8bit(groups: Iterable[dict], learning_rate: float, betas: tuple[float, float],
               epsilon: float) -> torch.optim.Optimizer:
    """AdamW with both moments in 8 bits; bitsandbytes keeps those of tensors under 4,096 numbers in 32."""
    return _bitsandbytes().optim.AdamW8bit(list(groups), lr=learning_rate, betas=betas, eps=epsilon)
