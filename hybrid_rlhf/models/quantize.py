"""Frozen weights in 4 or 8 bits, and AdamW with 8-bit moments. The only module that imports bitsandbytes and uses its
private parts.

Sources: QLoRA, arXiv 2305.14314 (NF4 in blocks of 64); 8-bit optimizers, arXiv 2110.02861.

Products with gradients and in scoring dequantise the weight to the activations' dtype. bitsandbytes' own layers are
not used, because their train and eval modes differ: on CPUs with AVX512-BF16 its 4-bit layers repack their bytes at the
first call in eval mode, multiply in bf16 from then on and pass no gradient through (0.50.2), and its 8-bit product
rounds activations with a threshold that depends on the other rows of the batch. Only the sampler on a GPU takes the
fused 4-bit product, which reads a quarter of the bytes, where a check at load found it equal;
engine/logprob_drift measures it with the sampler's other roundings.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import MethodType, ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from hybrid_rlhf.core.compat import Dependency
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.tensors import PackedMatrix
from hybrid_rlhf.models.lora import plain_linear_layers
from hybrid_rlhf.models.transformers_compat import is_published_quantised, kept_in_fp32

BITSANDBYTES = Dependency("bitsandbytes")
FUSED_ON = ("cuda",)  # types of devices on which the sampler may take the fused 4-bit product
# Largest difference between fused and dequantised product, relative to the largest number, that counts as rounding:
# each rounds its sums to the dtype once, by half a step of 2^-7 (bfloat16) or 2^-10 (float16) at most.
FUSED_BOUNDS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_log = logging.getLogger(__name__)
SETTINGS = {"4bit": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "8bit": dict(load_in_8bit=True)}


def require(what: str) -> None:
    """UserError unless bitsandbytes is installed; `what` is the option that needs it. Imports nothing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{what} needs bitsandbytes, which is not installed: pip install 'hybrid-rlhf[quantize]'")


def _bitsandbytes() -> ModuleType:
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)  # it warns of unused kernels
    import bitsandbytes

    return bitsandbytes


def quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` with a weight in 4 or 8 bits, by name."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "packed_weight")}


def settle(model: nn.Module, source: str, dtype: torch.dtype) -> nn.Module:
    """Give the quantised layers of a model that transformers just loaded from `source` our products, in place, and cast
    the other weights to `dtype`: loaded from quantised files, they still have the files' dtype.

    Raises RuntimeError if no layer is quantised.
    """
    model.quantised_from, model.config.dtype = source, dtype
    bnb = _bitsandbytes()
    layers = []
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            BITSANDBYTES.require(module, "support_avx512bf16_for_cpu")
            module.support_avx512bf16_for_cpu = False
            module.packed_weight = Dequantised(partial(_dequantised_4bit, module),
                                               partial(_packed_4bit, module, dtype, {}))
        elif isinstance(module, bnb.nn.Linear8bitLt):
            module.packed_weight = RowScaled(partial(_values_and_scales, module))
        else:
            continue
        layers.append(module)
        module.forward = MethodType(_forward, module)
    if not layers:
        raise RuntimeError(f"{type(model).__name__} has no linear layer that could be quantised")
    if is_published_quantised(model):
        is_kept = kept_in_fp32(model, dtype)
        for name, weight in unpacked_state(model).items():
            weight.data = weight.to(dtype) if weight.is_floating_point() and not is_kept(name) else weight
    if next(model.parameters()).device.type in FUSED_ON:
        _take_fused([m for m in layers if isinstance(m, bnb.nn.Linear4bit)], model.dtype)
    return model


def dequantised(layer: nn.Module) -> Tensor:
    """The weight of a linear layer, quantised or not, in fp32 (out, in)."""
    if hasattr(layer, "packed_weight"):
        return layer.packed_weight.dequantised(torch.float32)
    return layer.weight.detach().float()


@contextmanager
def multiplying_by(model: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """Within the block the quantised layers of `model` multiply by `weights` (name -> (out, in)) instead of their own,
    such as the weights before quantisation."""
    layers = quantized_layers(model)
    before = {name: layer.packed_weight for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.packed_weight = Dequantised(partial(weights[name].to, layer.weight.device))
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.packed_weight = before[name]


@contextmanager
def sampling_products(model: nn.Module) -> Iterator[None]:
    """Within the block products of `model` without gradients are the fused ones, where available."""
    weights = [w for w in (m.packed_weight for m in quantized_layers(model).values()) if isinstance(w, Dequantised)]
    for weight in weights:
        weight.is_sampling = True
    try:
        yield
    finally:
        for weight in weights:
            weight.is_sampling = False


def _dequantised_4bit(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    state = layer.weight.quant_state
    shape, size = state.shape, state.blocksize
    if shape[-1] % size and shape.numel() % size == 0:  # rows end inside a block: wrong with AVX-512 (0.50.2)
        state = copy(state)
        state.shape = torch.Size((shape.numel() // size, size))
    return _bitsandbytes().functional.dequantize_4bit(layer.weight.data, state).view(shape).to(dtype)


def _packed_4bit(layer: nn.Module, dtype: torch.dtype, kept: dict[str, Tensor]) -> PackedMatrix | None:
    """The weight as bitsandbytes keeps it, for kernels of ours; None for other blocks than 64 of one row, and where its
    numbers are rounded to another type before `dtype`.

    Scales that are quantised themselves are dequantised once and `kept`, as recorded steps know their address: half a
    bit for each number of the weight.
    """
    state = layer.weight.quant_state
    if state.blocksize != 64 or state.shape[-1] % 64 or state.dtype not in (torch.float32, dtype):
        return None
    if kept.get("source") is not state.absmax:
        scales = (_bitsandbytes().functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
                  if state.nested else state.absmax)
        kept.update(source=state.absmax, scales=scales.float())
    return PackedMatrix(layer.weight.data.view(torch.uint8).view(-1), kept["scales"], state.code, state.shape)


def has_own_product(layer: nn.Module) -> bool:
    """Whether the layer's forward is still the one that `settle` gave it."""
    return getattr(vars(layer).get("forward"), "__func__", None) is _forward


def _fused_4bit(layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    return _bitsandbytes().matmul_4bit(x, layer.weight.data, layer.weight.quant_state, bias=bias)


def _values_and_scales(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """int8 values (out, in), and the largest magnitude of each row, which 127 stands for."""
    values = layer.weight.CB if layer.weight.CB is not None else layer.state.CB
    return values, layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB


def _forward(self: nn.Module, x: Tensor) -> Tensor:
    bias = None if self.bias is None else self.bias.to(x.dtype)
    if torch.is_grad_enabled():
        return PackedLinear.apply(x, bias, self.packed_weight)
    return self.packed_weight.sampled(x, bias)


def _take_fused(layers: list[nn.Module], dtype: torch.dtype) -> None:
    """Give `layers` bitsandbytes' fused 4-bit product for sampling, if for each of their shapes it equals the product
    with the dequantised weight; else warn why not."""
    layers = [m for m in layers if m.in_features % m.weight.quant_state.blocksize == 0]  # there is no kernel for others
    one_each = {m.weight.quant_state.shape: m for m in layers}.values()
    reason = next((difference for m in one_each if (difference := _difference(m, dtype))), None)
    if reason:
        _log.warning("4-bit weights are dequantised at every decode step, which takes about three times as long: "
                     "bitsandbytes' fused product %s", reason)
        return
    for layer in layers:
        layer.packed_weight.fused = partial(_fused_4bit, layer)


@torch.no_grad()
def _difference(layer: nn.Module, dtype: torch.dtype) -> str | None:
    """How the fused product of `layer` fails or differs, for the row counts of decode steps, by which bitsandbytes
    chooses its kernel; None if it is right."""
    weight, random = layer.packed_weight, torch.Generator().manual_seed(0)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    for rows in (1, 4, 8, 16, 32, 64):
        x = torch.randn(rows, layer.in_features, generator=random).to(layer.weight.device, dtype)
        expected = weight.product(x, bias).float()
        try:
            fused = _fused_4bit(layer, x, bias).float()
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, AttributeError) as error:
            return f"fails ({str(error).strip().splitlines()[0]})"
        gap = float((fused - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        if not gap <= FUSED_BOUNDS[dtype]:
            return f"differs by {gap:.2g} of the largest number, and at most {FUSED_BOUNDS[dtype]} is rounding"
    return None


def unpacked_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model`, of the parameters themselves, without the packed weights and scales of its quantised
    layers."""
    inside = tuple(f"{name}.{part}" for name in quantized_layers(model) for part in ("weight", "SCB"))
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if not (inside and k.startswith(inside))}


def adamw_8bit(groups: Iterable[dict], learning_rate: float, betas: tuple[float, float],
               epsilon: float) -> torch.optim.Optimizer:
    """AdamW with both moments in 8 bits; bitsandbytes keeps moments of tensors under 4,096 numbers in 32."""
    return _bitsandbytes().optim.AdamW8bit(list(groups), lr=learning_rate, betas=betas, eps=epsilon)


# -- Products with frozen weights in 4 or 8 bits, with gradients for their inputs --------------------------------------


class PackedWeight(Protocol):
    """A quantised weight W (out, in). Its methods are not recorded by autograd.

    packed(): the parts for a kernel that reads it as it is, or None; None itself where another weight stands in.
    """

    packed: Callable[[], PackedMatrix | None] | None

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

    def __init__(self, dequantised: Callable[[torch.dtype], Tensor],
                 packed: Callable[[], PackedMatrix | None] | None = None) -> None:
        self.dequantised, self.packed = dequantised, packed
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

    def __init__(self, raw_parts: Callable[[], tuple[Tensor, Tensor]]) -> None:
        self._raw_parts, self._kept = raw_parts, {}
        largest = float(self._parts()[1].max())
        # values up to 127 may overflow float16 (65,504): a power of two scales them to the size of weights, exactly
        self._power = 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 1.0

    def _parts(self) -> tuple[Tensor, Tensor]:
        """Values and factors, which are kept, as recorded steps know their address."""
        values, scales = self._raw_parts()
        if self._kept.get("source") is not scales:
            self._kept.update(source=scales, factors=scales.float() / 127.0)
        return values, self._kept["factors"]

    def packed(self) -> PackedMatrix | None:
        values, factors = self._parts()
        return PackedMatrix(values, factors, None, values.shape)

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


# -- Stand-ins for bitsandbytes' quantised layers, with which a memory plan counts bytes -------------------------------


class Packed(nn.Linear):
    """A frozen linear layer in 4 or 8 bits, and its packed weight, whose dequantised copy exists during a product only;
    not of type nn.Linear, so that only adapters are fused with it."""

    @property
    def packed_weight(self) -> PackedWeight:
        return Dequantised(lambda _dtype: torch.empty_like(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        return PackedLinear.apply(x, self.bias, self.packed_weight)


def pack(model: nn.Module) -> None:
    """Let every frozen linear layer of `model` but its heads compute as a quantised one. In place."""
    names = set(plain_linear_layers(model))
    for name, module in model.named_modules():
        if name.removesuffix(".base_layer") in names and type(module) is nn.Linear:
            module.__class__ = Packed
