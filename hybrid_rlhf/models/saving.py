"""Save models as folders that plain transformers loads, and reload them. Imports transformers, as load does."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.core.out_of_memory import is_out_of_memory
from hybrid_rlhf.models import quantize, shards
from hybrid_rlhf.models.carried import carry_files
from hybrid_rlhf.models.dropout import dropout_in_config
from hybrid_rlhf.models.lora import plain_name
from hybrid_rlhf.models.merging import Weight
from hybrid_rlhf.models.transformers_compat import (
    as_plain_model,
    as_stored,
    in_configurations,
    is_published_quantised,
)

_log = logging.getLogger(__name__)


def save(model: nn.Module, weights: Mapping[str, Weight], folder: str | Path) -> None:
    """`weights` as safetensors with the model's configuration, which says their dtype, in transformers' own layout.

    Weights of a quantised model are dequantised, so the folder is that of a plain model.
    """
    save_settings(model, weights, Path(folder))
    shards.write(model, weights, Path(folder))
    share_as(Path(folder) / "config.json")


def save_settings(model: nn.Module, weights: Mapping[str, Weight], folder: Path) -> None:
    """Write everything but the weights: config.json, generation_config.json, and the model's custom code."""
    import transformers

    transformers.logging.disable_progress_bar()
    written = next(w.like.dtype for w in weights.values() if w.like.is_floating_point())
    with dropout_in_config(model), as_plain_model(model), in_configurations(model, dtype=written):
        model.save_pretrained(folder, state_dict={})  # with the live model's dtype
        model.config.dtype = written
        model.config.save_pretrained(folder)
    if model.can_generate():  # unchanged: save_pretrained refuses settings of which loading only warns
        model.generation_config.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])


def save_beside(model: nn.Module, tokenizer, folder: Path) -> None:  # noqa: ANN001 - a transformers class
    """Save what belongs beside a model's weights: `tokenizer`, and files from the folder of its base."""
    tokenizer.save_pretrained(folder)
    carry_files(model, tokenizer, folder)


def share_as(settings: Path) -> None:
    """Give the weights beside `settings` its file mode: safetensors makes them readable for their owner only."""
    for weights in settings.parent.glob("*.safetensors"):
        weights.chmod(settings.stat().st_mode)


def reload_like(model: nn.Module, folder: str | Path) -> nn.Module:
    """The model in `folder`, by the class and in the dtype of `model` (adapters aside)."""
    dtype = next(model.parameters()).dtype
    return type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True)


def reload_mapped(model: nn.Module, folder: str | Path, stored: torch.dtype) -> nn.Module:
    """`reload_like`, with each weight in the dtype of its file, so that it is memory-mapped and not read (`as_stored`);
    buffers are as in `reload_like`. stored: the files' dtype. To compute, enter `held_in`."""
    with as_stored():
        again = reload_like(model, folder)
    dtype = next(model.parameters()).dtype
    for buffer in again.buffers():
        buffer.data = buffer.to(dtype) if buffer.dtype == stored else buffer.data
    return again


@contextmanager
def held_in(dtype: torch.dtype, stored: torch.dtype, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within the block those of `parameters` in the dtype `stored` are held in `dtype`."""
    before = [(p, p.data) for p in parameters if p.dtype == stored != dtype]
    for parameter, mapped in before:
        parameter.data = mapped.to(dtype)
    try:
        yield
    finally:
        for parameter, mapped in before:
            parameter.data = mapped


def original_weights(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """The weights of the quantised layers of `model` before quantisation, by layer, in their file's dtype, on the CPU.

    None, with a warning, where they are not available: the files are gone, or were quantised themselves.
    """
    if is_published_quantised(model):
        _log.warning("%s holds quantised weights: what is exported is what they stand for, as plain weights",
                     model.quantised_from)
        return None
    try:
        original = _read_again(model, model.quantised_from)
        weights = {name: original.get_submodule(plain_name(name)).weight.detach()
                   for name in quantize.quantized_layers(model)}
    except (OSError, ValueError, RuntimeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        _log.warning("the weights that were quantised cannot be read again (%s): adapters are merged into what the "
                     "quantisation left of them", str(error).strip().splitlines()[0])
        return None
    return weights


def _read_again(model: nn.Module, source: str) -> nn.Module:
    """Reload the model at `source` by the class of `model`, in the dtype of its files."""
    import transformers

    settings = copy.copy(model.config)
    vars(settings).pop("quantization_config", None)
    packed = {"quantization_config": dequantise} if (dequantise := getattr(model, "dequantised_by", None)) else {}
    if packed:
        settings.quantization_config = type(settings).from_pretrained(source).quantization_config
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it warns of a head that is new in the live model too
    try:
        return type(model).from_pretrained(
            source, config=settings, dtype="auto", use_safetensors=True,
            ignore_mismatched_sizes=True, **packed)  # embeddings may have grown
    finally:
        transformers.logging.set_verbosity(level)


@torch.no_grad()
def share_kept(model: nn.Module, weights: Mapping[str, Weight], dtype: torch.dtype) -> float:
    """Share of the training update of `weights` that is left after rounding to `dtype`: with w the change from the
    files that `model` was loaded from and q the same after rounding, q . w / w . w.

    A change of less than half a step of `dtype` is rounded away: 1e-4 of a weight of 0.1 in bfloat16. 1 where nothing
    changed, or the files are gone; 0 where a number is too large for `dtype`.
    """
    try:
        loaded = _loaded_weights(model)
    except (OSError, ValueError, RuntimeError):
        return 1.0
    left = total = 0.0
    for name, entry in weights.items():
        like, before = entry.like, None if name == "score.weight" else loaded(name)  # may be newly initialised
        if before is None or before.ndim != like.ndim or before.shape[1:] != like.shape[1:]:
            continue
        if not like.is_floating_point():
            continue
        rows = slice(min(len(like), len(before))) if like.ndim else ...
        weight = entry.make()
        rounded, old = weight.to(dtype), before[rows].to(weight.device, torch.float32)
        if not rounded.isfinite().all():
            return 0.0
        change = weight[rows].float() - old
        left += float(((rounded[rows].float() - old) * change).sum())
        total += float((change * change).sum())
    return left / total if total else 1.0


def _loaded_weights(model: nn.Module) -> Callable[[str], torch.Tensor | None]:
    """The weights that `model` was loaded with, by name."""
    if is_published_quantised(model):
        layers = {f"{plain_name(name)}.weight": layer for name, layer in quantize.quantized_layers(model).items()}
        return lambda name: quantize.dequantised(layers[name]) if name in layers else None
    with as_stored():
        return _read_again(model, model.config.name_or_path).state_dict().get
