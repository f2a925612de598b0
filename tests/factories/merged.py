"""A model's merged weights all at once: the product's, made one by one, and a second implementation that makes them
together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid_rlhf.models import added_rows, quantize
from hybrid_rlhf.models.lora import lora_layers, plain_name
from hybrid_rlhf.models.merging import plain_weights


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.make().detach() for name, weight in plain_weights(model).items()}


@torch.no_grad()
def whole_merge(model: nn.Module) -> dict[str, Tensor]:
    """Every weight in the model's dtype in one dict, tied ones as one tensor; adapters of linear layers by peft's own
    product, which is (B A) scaled, in fp32."""
    layers = quantize.quantized_layers(model)
    packed = tuple(f"{name}.{part}" for name in layers for part in ("weight", "SCB"))
    state = {k: v for k, v in model.state_dict().items() if not (packed and k.startswith(packed))}
    state |= {f"{name}.weight": quantize.dequantised(layer).to(model.dtype) for name, layer in layers.items()}
    state = {plain_name(k): v for k, v in state.items() if ".lora_" not in k and not added_rows.is_of_rows(k)}
    for name, layer in added_rows.tables(model).items():
        if hasattr(layer, "added_rows"):
            before = state[f"{name}.weight"]
            after = added_rows.with_rows(layer, before)
            state |= {k: after for k, v in state.items() if v.data_ptr() == before.data_ptr()}
    for name, layer in lora_layers(model).items():
        (adapter,) = layer.active_adapters
        down, up = layer.lora_A[adapter].weight.float(), layer.lora_B[adapter].weight.float()
        place = f"{plain_name(name)}.weight"
        total = quantize.dequantised(layer.get_base_layer()) + (up @ down) * layer.scaling[adapter]
        state[place] = total.to(state[place].dtype)
    return state
