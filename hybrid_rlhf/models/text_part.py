"""Find the text part of a model: causal language model, backbone, text backbone.

A composite class (ForConditionalGeneration) holds a causal language model and towers for images or sound, which text
alone never uses. The parts are found from its embeddings, its head and its configuration's text part, and not from
names: below the smallest module that holds both embeddings and head is the backbone, whose output the head reads, and
inside it, or equal to it, the text backbone. `backbone.check_head` verifies it on the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn


class Places(NamedTuple):
    """Names of modules. causal: the one with embeddings and head ("": the model itself); backbone: its attribute whose
    output the head reads; text: the text model in the backbone."""

    causal: str
    backbone: str
    text: str


_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def places(model: nn.Module) -> Places:
    """The names of the parts of a causal or sequence classification model of transformers."""
    if model not in _places:
        _places[model] = _find(model)
    return _places[model]


def _find(model: nn.Module) -> Places:
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    head = getattr(model, "score", None) if head is None else head
    holder, name = model, ""
    while True:
        child, part = next((n, m) for n, m in holder.named_children() if any(e is embeddings for e in m.modules()))
        path = f"{name}.{child}" if name else child
        if not any(m is head for m in part.modules()):
            break
        holder, name = part, path
    kind = model.config.get_text_config().model_type
    text = next((n for n, m in part.named_modules() if getattr(getattr(m, "config", None), "model_type", None) == kind),
                "")
    return Places(name, child, f"{path}.{text}" if text else path)


def causal_part(model: nn.Module) -> nn.Module:
    """The causal model: `model`, or the module inside it with its embeddings and its head (Llama 4)."""
    return model.get_submodule(places(model).causal)


def text_forward(model: nn.Module) -> nn.Module:
    """The module whose forward is run for text alone: the causal part, or, where that would use towers, the text
    backbone, to whose states `backbone.text_logits` applies the head. There the ids of images and sound, which a policy
    may sample, are ordinary tokens, in decoding as in training."""
    causal, backbone, text = places(model)
    is_plain = text == (f"{causal}.{backbone}" if causal else backbone)
    return model.get_submodule(causal if is_plain else text)


def text_backbone(model: nn.Module) -> nn.Module:
    """The module that computes the hidden states of tokens; for a BackboneWithHead its backbone."""
    return model.get_submodule(places(model).text) if hasattr(model, "config") else model.base_model


def reads_text(model: nn.Module) -> Callable[[str], bool]:
    """A function that tells whether text uses the module or parameter of a name: each one of a plain model, and not the
    towers of a composite one."""
    causal, backbone, text = places(model)
    prefix = f"{causal}." if causal else ""

    def is_of_text(name: str) -> bool:  # also modules that contain the text part
        return f"{name}.".startswith(f"{text}.") or (
            f"{name}.".startswith(prefix) and not name.startswith(f"{prefix}{backbone}."))

    return is_of_text


def towers(model: nn.Module) -> list[str]:
    """Names of the outermost modules that text does not use; empty for a plain model."""
    is_of_text = reads_text(model)
    names = [n for n, _ in model.named_modules() if n and not is_of_text(n)]
    return [n for n in names if n.rpartition(".")[0] not in names]
