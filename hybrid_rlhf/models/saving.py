"""Save models as folders that plain transformers loads, and reload them. Imports transformers, as load does."""

from __future__ import annotations

import copy
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.models import quantize
from hybrid_rlhf.models.complete import few
from hybrid_rlhf.models.dropout import dropout_in_config
from hybrid_rlhf.models.folder_files import CONFIG, files_inside, is_local, read_object
from hybrid_rlhf.models.lora import plain_name
from hybrid_rlhf.models.merging import Weight
from hybrid_rlhf.models.transformers_compat import (
    as_files_have_it,
    as_plain_model,
    as_stored,
    has_own_code,
    in_configurations,
    is_published_quantised,
    names_in_files,
)
from hybrid_rlhf.models.weights import dtypes

_log = logging.getLogger(__name__)


def save(model: nn.Module, weights: Mapping[str, Weight], folder: str | Path) -> None:
    """`weights` as safetensors with the model's configuration, which says their dtype, in transformers' own layout.

    Weights of a quantised model are dequantised, so the folder is that of a plain model.
    """
    save_settings(model, weights, Path(folder))
    write(model, weights, Path(folder))
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


# ----------------------------------------------------------------------------------------------------------------------
# Write a model's weights as safetensors in transformers' layout, piece by piece: about one file and one layer
# are in memory at a time


MAX_BYTES = 2 * 10**9  # of one file
def write(model: nn.Module, weights: Mapping[str, Weight], folder: Path) -> None:
    """`weights` (those tied to each other once) as model.safetensors, or as model-00001-of-0000N.safetensors and an
    index where they take more than MAX_BYTES; with the names and splits of this architecture's files, and after them
    the tensors that are carried over from those files.
    """
    from safetensors.torch import save_file

    kept = _kept(model, weights)
    places: dict[str, Path] = {}
    count = size = 0
    for shard in _shards(chain(_as_in_files(model, kept), carried_tensors(model))):
        path = folder / f"part-{len(set(places.values()))}"
        save_file(shard, path, {"format": "pt"})
        places |= dict.fromkeys(shard, path)
        count, size = count + sum(v.numel() for v in shard.values()), size + sum(v.nbytes for v in shard.values())
    parts = list(dict.fromkeys(places.values()))
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    named = {part: f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i, part in enumerate(parts, start=1)}
    for part, name in named.items():
        part.rename(folder / name)
    index = {"metadata": {"total_parameters": count, "total_size": size},
             "weight_map": {name: named[part] for name, part in places.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


def wider_in_files(model: nn.Module, weights: Mapping[str, Weight], dtype: torch.dtype) -> set[str]:
    """Names of `weights` that are fp32 in the files that `model` was loaded from, where `dtype` has fewer bits."""
    base = base_folder(model) if dtype.itemsize < 4 else None
    wide = {name for name, kind in dtypes(base).items() if kind == "F32"} if base else set()
    return {name for name in weights if wide and wide.intersection(n for n, _ in _shapes(model, [name], weights))}


def check_names(model: nn.Module, weights: Mapping[str, Weight]) -> None:
    """Raise the errors that `write` would raise about the names and shapes of `weights`."""
    kept = _kept(model, weights)
    _shapes(model, list(kept), kept)


def _kept(model: nn.Module, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    return {name: weights[name] for name in names_in_files(model, {k: w.source for k, w in weights.items()})}


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group weights in files of at most MAX_BYTES, a larger one alone; each dict is cleared when the next is made."""
    shard: dict[str, Tensor] = {}
    for name, value in weights:
        if shard and sum(v.nbytes for v in shard.values()) + value.nbytes > MAX_BYTES:
            yield shard
            shard.clear()
        shard[name] = value
    yield shard


def _as_in_files(model: nn.Module, weights: Mapping[str, Weight]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, on the CPU and contiguous."""
    for group in _groups(model, weights):
        made = as_files_have_it(model, {name: weights[name].make().detach().cpu() for name in group})
        while made:
            name = next(iter(made))
            yield name, made.pop(name).contiguous()


def _groups(model: nn.Module, weights: Mapping[str, Weight]) -> list[list[str]]:
    """The groups of weights to compute at once: single ones; or a layer's, where files split them differently than the
    model; or all, where files mix weights of several layers."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault(_layer(name), []).append(name)
    all_shapes = _shapes(model, list(weights), weights)
    for groups in ([[name] for name in weights], list(layers.values())):
        pieces = [item for group in groups for item in _shapes(model, group, weights)]
        if sorted(pieces) == sorted(all_shapes):
            return groups
    _log.warning("the files of %s mix weights of several layers: the export holds all of them at once",
                 type(model).__name__)
    return [list(weights)]


def _layer(name: str) -> str:
    match = re.match(r".*?\.\d+\.", name)
    return match.group() if match else name


def _shapes(model: nn.Module, names: list[str], weights: Mapping[str, Weight]) -> list[tuple[str, tuple[int, ...]]]:
    tensors = as_files_have_it(model, {name: weights[name].like for name in names})
    return [(name, tuple(value.shape)) for name, value in tensors.items()]


# ----------------------------------------------------------------------------------------------------------------------
# Copy to an export what stays unchanged from the folder that its model was loaded from: every file that
# describes it and is not written again (a processor's settings, a licence), and the tensors that its class does
# not read


# What describes a model beside its weights: settings, templates, vocabularies, licences.
_TAKEN = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "*.py", "LICENSE*", "NOTICE*", "USE_POLICY*")
_LARGEST = 64 * 2**20  # bytes of such a file; a larger one is data
# Written again, or about what is not exported: training state, an adapter, the format of quantised weights.
_REPLACED = ("README.md", CONFIG, "generation_config.json", "special_tokens_map.json", "added_tokens.json", "Modelfile",
             "adapter_config.json", "trainer_state.json", "run.json", "quantize_config.json", "quant_config.json",
             "hf_quant_config.json")
_VOCABULARIES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "tekken.json",
                 "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json")


def carry_files(model: nn.Module, tokenizer, folder: Path) -> None:  # noqa: ANN001 - a transformers class
    """Copy the files of the folder that `model` was loaded from to `folder`, without replacing any; those of its
    tokenizer only if it is `tokenizer`."""
    if (base := base_folder(model)) is None:
        return
    for path in files_inside(base):
        is_taken = any(fnmatch(path.name, pattern) for pattern in _TAKEN) and path.stat().st_size <= _LARGEST
        is_left_out = not is_taken or path.name.endswith(".index.json") or path.name in _REPLACED or (
            path.suffix == ".py" and not has_own_code(model)) or (
            path.name in _VOCABULARIES and not _is_tokenizer_of(base, model, tokenizer, folder)) or (
            path.name == "chat_template.json" and (folder / "chat_template.jinja").exists())  # it would win
        if not is_left_out and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _is_tokenizer_of(base: Path, model: nn.Module, tokenizer, folder: Path) -> bool:  # noqa: ANN001
    """Whether `tokenizer`, saved to `folder`, is that of the model's folder `base`, apart from added tokens."""
    files = [place / "tokenizer.json" for place in (base, folder)]
    return str(tokenizer.name_or_path) == model.config.name_or_path or (
        all(file.exists() for file in files) and len({str(read_object(file).get("model")) for file in files}) == 1)


def base_folder(model: nn.Module) -> Path | None:
    """The folder with the files of the model's base; for a hub id, a download without the weights."""
    path = model.config.name_or_path
    return Path(path) if path and is_local(path) else _downloaded(path) if path else None


@cache
def _downloaded(path: str) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=list(_TAKEN), ignore_patterns=["*/*", "*.index.json"]))
    except (OSError, ValueError, RuntimeError) as error:
        _log.warning("an export will lack the files of %s beside its model (such as a processor's): %s", path,
                     str(error).strip().splitlines()[0])
        return None


def carried_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the base's files that the class of `model` does not read, by name, one at a time. Warns of those
    left out: packed ones, which have no place among plain weights, and those whose files are gone."""
    from safetensors import safe_open

    unread = getattr(model, "unread_tensors", {})
    is_packed = is_published_quantised(model) or getattr(model, "dequantised_by", None) is not None
    carried = {} if is_packed else {k: file for k, file in unread.items() if Path(file).exists()}
    if left_out := unread.keys() - carried.keys():
        _log.warning("the export lacks %s of %s that %s does not read", few(sorted(left_out), "tensor"),
                     model.config.name_or_path, type(model).__name__)
    for name, file in carried.items():
        with safe_open(file, framework="pt") as opened:
            yield name, opened.get_tensor(name)
