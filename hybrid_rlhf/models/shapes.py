"""Models without weights, from a configuration alone, for counting and tracing. Imports transformers.

Tensors are torch's fake tensors: they have shapes, dtypes and storage sizes, but no bytes. Operations on them choose
the kernels of the real device, so that the activations which a forward saves can be counted without computing it.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.core import torch_compat
from hybrid_rlhf.core.config import check
from hybrid_rlhf.models.backbone import text_forward
from hybrid_rlhf.models.dropout import disable_dropout
from hybrid_rlhf.models.folder_files import refusing
from hybrid_rlhf.models.hf_attention import cache_of
from hybrid_rlhf.models.load import (
    PRESETS,
    ModelConfig,
    causal_class,
    check_folder,
    named_attention,
    prepare,
    read_settings,
    resolve_dtype,
    scalar_class,
)
from hybrid_rlhf.models.lora import LoraConfig, adapter_dtype, add_lora, lora_layers
from hybrid_rlhf.models.transformers_compat import never_packed


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block no warnings about a model that is never run; the run itself gives them."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it; it warns of missing kernels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)


@contextmanager
def without_memory(device: torch.device) -> Iterator[None]:
    """Within the block new tensors are fake ones on `device`; nothing is allocated and nothing is computed. A build of
    torch without CUDA has no autograd on fake GPU tensors, so there they are on the CPU, with the same sizes.
    """
    is_there = device.type == "cpu" or (torch.cuda.is_available() and torch.backends.cuda.is_built())
    with never_packed(), torch_compat.fake_mode(), torch.device(device if is_there else "cpu"):
        yield


def read_config(model: ModelConfig):  # noqa: ANN201 - a transformers class
    """The configuration that `model` names; only this file is read (once), or fetched from the hub.

    Raises UserError for a folder without a model, and for an encoder-decoder.
    """
    if model.preset:
        from transformers import AutoConfig

        kind, shape = PRESETS[model.preset]
        return AutoConfig.for_model(kind, **shape, vocab_size=model.vocab_size)
    path, key = model.model_name_or_path, (model.model_name_or_path, edition(model))
    if key in _configs:
        return _configs[key]
    check(path is not None, "no model: give model.model_name_or_path (hub id or folder) or model.preset")
    check_folder(path, needs=())
    config = read_settings(path, model.trust_remote_code)
    check(not getattr(config, "is_encoder_decoder", False),
          f"{path} is an encoder-decoder ({config.model_type}); a causal language model is needed")
    _configs[key] = config
    return config


def edition(model: ModelConfig) -> tuple[int, ...]:
    """Modification time (ns) and size of the configuration in the folder that `model` names: they change when another
    model is written there. Empty where there is no such folder."""
    try:
        status = (Path(model.model_name_or_path or "") / "config.json").stat()
    except (OSError, ValueError):  # a null byte
        return ()
    return status.st_mtime_ns, status.st_size


_configs: dict[tuple[str | None, tuple[int, ...]], object] = {}


def shallow(config, depth: int):  # noqa: ANN001, ANN201 - a transformers class
    """A copy of the configuration with `depth` layers; lists with one entry per layer are cut to match."""
    cut = copy.deepcopy(config)
    text = cut.get_text_config()
    layers = text.num_hidden_layers
    for name, value in vars(text).copy().items():
        if isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(text, name, value[:depth])
    text.num_hidden_layers = depth
    return cut


def empty_model(config, model: ModelConfig, device: torch.device, *, is_scalar: bool,  # noqa: ANN001
                dropout: bool = False) -> nn.Module:
    """The model that recipes would load for `model`, adapters and frozen parts included, on torch's meta device.

    is_scalar: a backbone with a scalar head (critic, reward model) instead of a language model head.
    """
    import transformers
    from transformers.initialization import no_init_weights

    settings = copy.deepcopy(config)
    text = settings.get_text_config()  # a composite configuration has no pad id itself
    text.pad_token_id = 0 if getattr(text, "pad_token_id", None) is None else text.pad_token_id
    if is_scalar:
        settings.num_labels = 1
    kind = scalar_class(settings) if is_scalar else causal_class(settings)
    with (no_init_weights(), torch.device("meta"), _quiet(),
          refusing(config.model_type, "--plan needs a model that transformers can build")):
        empty = getattr(transformers, kind).from_config(
            settings, dtype=resolve_dtype(model.dtype, device), trust_remote_code=model.trust_remote_code,
            **named_attention(model, settings))
        empty.tie_weights()  # transformers skips it without initialisation
    check(not is_scalar or hasattr(empty, "score"), f"{type(empty).__name__} has no linear score head; use a "
                                                    "decoder-only model")
    with _quiet():
        prepare(empty, model, vocab_size=0)
    if not dropout:
        disable_dropout(empty)
    if model.lora.r:
        _adapt(empty, model.lora if dropout else replace(model.lora, dropout=0.0))
        if is_scalar:
            empty.score.weight.requires_grad_(True)
    return empty


def count_parameters(config, *, trust_remote_code: bool = False) -> int:  # noqa: ANN001 - a transformers class
    """Parameters of the causal language model of this configuration; tied ones count once."""
    model = ModelConfig(dtype="float32", trust_remote_code=trust_remote_code)
    return sum(p.numel() for p in empty_model(config, model, torch.device("cpu"), is_scalar=False).parameters())


def _adapt(model: nn.Module, lora: LoraConfig) -> None:
    with torch.device("meta"), _quiet():
        add_lora(model, lora)
    for layer in lora_layers(model).values():  # on the meta device peft does not cast them
        for part in (layer.lora_A, layer.lora_B):
            part.to(adapter_dtype(model))


def has_equal_layers(model: nn.Module) -> bool:
    """Whether all layers of `model` have equal modules, shapes and settings."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return len(stacks) == 1 and len({_description(layer) for layer in stacks[0]}) == 1


def _description(layer: nn.Module) -> tuple:
    return tuple((name, type(module), tuple((n, p.shape, p.dtype) for n, p in module.named_parameters(recurse=False)),
                  tuple((k, v) for k, v in vars(module).items()
                        if isinstance(v, (int, float, str, type(None))) and k not in ("layer_idx", "layer_index")))
                 for name, module in layer.named_modules())


def empty_classifier(config, model: ModelConfig, device: torch.device, labels: int) -> nn.Module:  # noqa: ANN001
    """The sequence-classification model that `model` names, on torch's meta device."""
    import transformers
    from transformers.initialization import no_init_weights

    settings = copy.deepcopy(config)
    settings.num_labels = labels
    with no_init_weights(), torch.device("meta"), _quiet():
        return transformers.AutoModelForSequenceClassification.from_config(
            settings, dtype=resolve_dtype(model.dtype, device), trust_remote_code=model.trust_remote_code)


def on_device(empty: nn.Module) -> nn.Module:
    """The same model with fake tensors of the device of `without_memory`, inside which this is called. In place.

    Made on the meta device first, because peft and Module.to do not work on fake tensors.
    """
    fakes: dict[int, torch.Tensor] = {}  # by id: tied weights stay tied
    for module in empty.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in fakes:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            setattr(module, name, fakes[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return empty


@torch.no_grad()
def cache_bytes(model: nn.Module) -> tuple[int, int]:
    """(bytes per token, bytes per sequence) of the cache that one sequence of `model` fills, inside `without_memory`.

    For plain attention the first is layers x key-value heads x head size x 2 x bytes of an element; recurrent and
    convolution states are the second. Sliding layers count as full ones, as in the decode engine.
    """
    out = text_forward(model)(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=True)
    growing = fixed = 0
    for layer in getattr(cache_of(out), "layers", []):
        for name, value in vars(layer).items():
            size = sum(t.numel() * t.element_size() for t in _tensors(value))
            is_growing = name in ("keys", "values", "indexer_keys")
            growing, fixed = (growing + size, fixed) if is_growing else (growing, fixed + size)
    return growing // _TOKENS, fixed


_TOKENS = 3  # fewer than any sliding window


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Tensors with more than one element in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 1:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
