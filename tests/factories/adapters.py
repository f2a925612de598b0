"""Tiny models with adapters that have learned something."""

from __future__ import annotations

import torch

from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from tests.factories.tiny import tiny_causal_lm


def base_with(*names: str, seed: int = 0, **changes) -> torch.nn.Module:
    """A tiny model with adapters that have learned something: no two are alike."""
    model = tiny_causal_lm(seed, **changes)
    for i, name in enumerate(names):
        torch.manual_seed(100 + i)
        add_lora(model, LoraConfig(r=4), name)
        for layer in lora_layers(model).values():
            torch.nn.init.normal_(layer.lora_B[name].weight, std=0.2)
    return model
