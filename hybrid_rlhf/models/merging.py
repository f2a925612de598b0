"""Merge low-rank adapters and rows of added tokens into the base weights, in fp32 and with one rounding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hybrid_rlhf.models import added_rows, peft_compat, quantize
from hybrid_rlhf.models.lora import lora_layers, plain_name


@dataclass(frozen=True)
class Weight:
    """One weight of a plain model, computed on demand. like: its shape and dtype, without memory; make: its value,
    which may be a tensor of the live model; source: equal for weights that are tied to each other; reads: tensors of
    the live model that must be gathered when it is made."""

    like: Tensor
    make: Callable[[], Tensor]
    source: Hashable
    reads: tuple[Tensor, ...] = ()


def plain_weights(model: nn.Module, dtype: torch.dtype | None = None,
                  shape_of: Callable[[Tensor], torch.Size] = lambda weight: weight.shape) -> dict[str, Weight]:
    """The state dict that `model` would have without peft and quantisation, the active adapters merged, each weight
    computed on demand; the model itself is not changed.

    The product B A is formed and added in fp32, to the weight that the layers multiply by (dequantised where it is
    packed), and rounded once to the dtype in which the model holds the weight. dtype: what numbers are rounded to
    instead (float32: exact). shape_of: the shape of a parameter when it is gathered.
    """
    weights = {plain_name(k): _rounded(v, dtype, shape_of(v)) for k, v in quantize.unpacked_state(model).items()
               if ".lora_" not in k and not added_rows.is_of_rows(k)}
    for name, layer in quantize.quantized_layers(model).items():
        like = torch.empty(layer.out_features, layer.in_features, dtype=dtype or model.dtype, device="meta")
        place = f"{plain_name(name)}.weight"
        weights[place] = Weight(like, partial(_dequantised, layer, like.dtype), place, tuple(layer.parameters()))
    weights |= _tables_with_rows(model, weights)
    for name, layer in lora_layers(model).items():
        place = merged_name(name, layer)
        like = weights[place].like
        reads = (*layer.parameters(), *added_rows.rows_of(layer.get_base_layer()))
        weights[place] = Weight(like, partial(_merged, layer, like.dtype), place, reads)
    return weights


def merged_name(name: str, layer: nn.Module) -> str:
    """The name of an adapted layer's weight in the plain model."""
    return f"{plain_name(name)}.{layer.parameter_name if _is_fused(layer) else 'weight'}"


def _rounded(value: Tensor, dtype: torch.dtype | None, shape: torch.Size) -> Weight:
    is_rounded = dtype is not None and value.is_floating_point()
    like = torch.empty(shape, dtype=dtype if is_rounded else value.dtype, device="meta")
    return Weight(like, lambda: value.detach().to(like.dtype), value.data_ptr() or id(value), (value,))


def _dequantised(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    return quantize.dequantised(layer).to(dtype)


def _tables_with_rows(model: nn.Module, weights: dict[str, Weight]) -> dict[str, Weight]:
    """The entries of `weights` for tables with rows of added tokens, tied ones included, with those rows in them."""
    changed = {}
    for name, layer in added_rows.tables(model).items():
        if hasattr(layer, "added_rows"):
            before = weights[f"{name}.weight"]
            after = replace(before, make=lambda layer=layer, make=before.make: added_rows.with_rows(layer, make()),
                            reads=(*before.reads, *added_rows.rows_of(layer)))
            changed |= {k: after for k, w in weights.items() if w.source == before.source}
    return changed


@torch.no_grad()
def _merged(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """The weight of an adapted layer with its active adapters merged, and with a table's rows of added tokens."""
    if _is_fused(layer):
        total = layer.get_param().float()
    else:
        base = layer.get_base_layer()
        total = added_rows.with_rows(base, quantize.dequantised(base))
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            total = total + _delta(layer, adapter)
    return total.to(dtype)


@torch.no_grad()
def adapted_weight(model: nn.Module, adapters: Sequence[str]) -> tuple[str, Tensor]:
    """Name and fp32 value of the last adapted linear layer's weight, with these adapters merged."""
    name, layer = [(n, m) for n, m in lora_layers(model).items() if not _is_fused(m)][-1]
    total = quantize.dequantised(layer.get_base_layer())
    for adapter in adapters:
        total = total + (_delta(layer, adapter) if adapter in layer.lora_A else 0.0)
    return f"{plain_name(name)}.weight", total


def _is_fused(layer: nn.Module) -> bool:
    """Whether an adapted layer is a fused expert weight and not a linear layer."""
    return hasattr(layer, "parameter_name")


def _delta(layer: nn.Module, adapter: str) -> Tensor:
    """(alpha / r) B A in fp32, in the shape of the base weight (transposed for Conv1D layers)."""
    down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
    if _is_fused(layer):  # A: (experts x r, in), B: (out, r x experts)
        down, up = down.view(layer.num_experts, -1, down.shape[1]), up.view(up.shape[0], -1, layer.num_experts)
        delta = torch.einsum("ore,eri->eoi", up, down) * layer.scaling[adapter]
        return delta if peft_compat.is_out_first(layer) else delta.mT  # (experts, out, in), or the other way round
    delta = (up @ down) * layer.scaling[adapter]
    return delta.T if layer.fan_in_fan_out else delta
