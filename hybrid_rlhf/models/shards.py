"""Write a model's weights as safetensors in transformers' layout, piece by piece: about one file and one layer are in
memory at a time."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from hybrid_rlhf.models.carried import base_folder, carried_tensors
from hybrid_rlhf.models.merging import Weight
from hybrid_rlhf.models.transformers_compat import as_files_have_it, names_in_files
from hybrid_rlhf.models.weights import dtypes

MAX_BYTES = 2 * 10**9  # of one file
_log = logging.getLogger(__name__)


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
