"""Low-rank adapters and rows of added tokens merged into the weights beside them, without losing what was learned."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybrid_rlhf.models import added_rows, peft_compat, quantize
from hybrid_rlhf.models.lora import lora_layers, plain_name


@torch.no_grad()
def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict `model` would have had without peft and quantisation, the active adapters merged; the model itself
    is not touched.

    The product B A is formed and added in fp32, to the weight that the layers multiply by (dequantised where it is held
    in fewer bits), and rounded to the model's dtype once, so that nothing is lost but that one rounding.
    """
    state = quantize.plain_state_dict(model, model.dtype)
    state = {plain_name(k): v for k, v in state.items() if ".lora_" not in k and not added_rows.is_of_rows(k)}
    state |= _rows_in_tables(model, state)
    for name, layer in lora_layers(model).items():
        total = layer.get_param().float() if _is_fused(layer) else _own_weight(layer.get_base_layer())
        for adapter in layer.active_adapters:
            if adapter in layer.lora_A:
                total = total + _delta(layer, adapter)
        place = f"{plain_name(name)}.{layer.parameter_name if _is_fused(layer) else 'weight'}"
        state[place] = total.to(state[place].dtype)
    return state


def _own_weight(layer: nn.Module) -> Tensor:
    """A layer's weight in fp32, dequantised, with the rows of added tokens where it is a table that has some."""
    return added_rows.with_rows(layer, quantize.dequantised(layer))


def _rows_in_tables(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries of `state` that tables with rows of added tokens have, tied ones as one tensor, those rows in it."""
    found = {}
    for name, layer in added_rows.tables(model).items():
        if hasattr(layer, "added_rows"):
            before = state[f"{name}.weight"]
            after = added_rows.with_rows(layer, before)
            found |= {k: after for k, v in state.items() if v.data_ptr() == before.data_ptr()}
    return found


@torch.no_grad()
def adapted_weight(model: nn.Module, adapters: Sequence[str]) -> tuple[str, Tensor]:
    """Name and fp32 value of the last adapted linear layer's weight, the given adapters merged into it."""
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
