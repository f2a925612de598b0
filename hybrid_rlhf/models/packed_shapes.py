"""Stand-ins for bitsandbytes' quantised layers, with which a memory plan counts bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hybrid_rlhf.models.lora import plain_linear_layers
from hybrid_rlhf.models.packed_products import Dequantised, PackedLinear, PackedWeight


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
