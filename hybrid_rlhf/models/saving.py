"""Models as folders that plain transformers loads, and back again. With load a door to transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn


def save(model: nn.Module, state: dict[str, torch.Tensor], folder: str | Path) -> None:
    """`state` as safetensors with the model's configuration, in transformers' own layout.

    Of a quantised model `state` holds the plain weights, so the folder is that of a plain model.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    hidden = [(owner, name, vars(owner).pop(name)) for owner, name in
              ((model, "hf_quantizer"), (model.config, "quantization_config")) if name in vars(owner)]
    try:
        model.save_pretrained(folder, state_dict=state)
    finally:
        for owner, name, value in hidden:
            setattr(owner, name, value)


def reload_like(model: nn.Module, folder: str | Path) -> nn.Module:
    """The model in `folder`, by the class and in the dtype of `model` (adapters aside)."""
    dtype = next(model.parameters()).dtype
    return type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True)
