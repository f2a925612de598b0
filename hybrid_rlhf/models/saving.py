"""Models as folders that plain transformers loads, and back again. With load a door to transformers."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.models import quantize
from hybrid_rlhf.models.dropout import dropout_in_config
from hybrid_rlhf.models.lora import plain_name

_log = logging.getLogger(__name__)


def save(model: nn.Module, state: dict[str, torch.Tensor], folder: str | Path) -> None:
    """`state` as safetensors with the model's configuration, in transformers' own layout.

    Of a quantised model `state` holds the plain weights, so the folder is that of a plain model.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    hidden = [(owner, name, vars(owner).pop(name)) for owner, name in
              ((model, "hf_quantizer"), (model.config, "quantization_config")) if name in vars(owner)]
    try:
        with dropout_in_config(model):
            model.save_pretrained(folder, state_dict=state)
    finally:
        for owner, name, value in hidden:
            setattr(owner, name, value)


def reload_like(model: nn.Module, folder: str | Path) -> nn.Module:
    """The model in `folder`, by the class and in the dtype of `model` (adapters aside)."""
    dtype = next(model.parameters()).dtype
    return type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True)


def original_weights(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The weights that the quantised layers of `model` were made of, by layer, in the dtype of their file, on the CPU.

    None, with a line that says so, where they are not to be had: the files are gone, or were quantised themselves.
    """
    import transformers

    settings = copy.copy(model.config)
    vars(settings).pop("quantization_config", None)
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # of a head that is new in the live model too
    try:
        original = type(model).from_pretrained(
            model.quantised_from, config=settings, dtype="auto", use_safetensors=True,
            ignore_mismatched_sizes=True)  # of embeddings that have grown
        found = {name: original.get_submodule(plain_name(name)).weight.detach()
                 for name in quantize.quantized_layers(model)}
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        _log.warning("the weights that were quantised cannot be read again (%s): adapters are merged into what the "
                     "quantisation left of them", str(error).strip().splitlines()[0])
        return None
    finally:
        transformers.logging.set_verbosity(level)
    return found if all(w.is_floating_point() for w in found.values()) else None
