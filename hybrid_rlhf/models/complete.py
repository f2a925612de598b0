"""Check that a model's files hold all of its weights; missing ones would silently be random numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from torch import nn

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.models.backbone import text_backbone
from hybrid_rlhf.models.folder_files import CONFIG, read_object
from hybrid_rlhf.models.weights import read_header

_log = logging.getLogger(__name__)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # transformers takes the first that exists

# Buffers in old files that a model computes itself.
_TABLES = re.compile(r"(\.inv_freq|_cached|\.masked_bias|\.causal_mask|\.position_ids|\.(attn|attention)\.bias"
                     r"|\.embed_positions\.weights)$")


def check_plain_weights(settings: object, path: str, quantize: str | None) -> None:
    """Raise UserError for weights in a format that cannot be trained here; `settings` is the model's configuration.
    bitsandbytes weights are accepted in the bits that `quantize` (4bit or 8bit) asks for, those of DEQUANTISED as plain
    ones."""
    method, bits = packed_as(settings)
    if method is None or (method in DEQUANTISED and quantize is None):
        return
    check(method not in DEQUANTISED, f"{path} holds weights quantised by {method}, which are dequantised as they are "
                                     f"read and cannot be held in {quantize}; leave out model.load_in_{quantize}")
    if method != "bitsandbytes":
        raise UserError(f"{path} holds weights quantised by {method}, which can be neither trained nor exported here; "
                        "give the model that they were made from (model.load_in_4bit holds it in 4 bits)")
    check(quantize == bits, f"{path} holds weights quantised by bitsandbytes in {bits}; give the model that they were "
                            f"made from, or set model.load_in_{bits} to train adapters over them")


DEQUANTISED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}  # quantisers that transformers can dequantise


def packed_as(settings: object) -> tuple[str | None, str | None]:
    """The quantisation method in a model's configuration or None, and for bitsandbytes 4bit or 8bit."""
    config = getattr(settings, "quantization_config", None)
    if config is None:
        return None, None
    config = dict(config if isinstance(config, Mapping) else vars(config))
    method = getattr(config.get("quant_method"), "value", config.get("quant_method")) or "bitsandbytes"
    return method, ("8bit" if config.get("load_in_8bit") else "4bit") if method == "bitsandbytes" else None


def dequantising(settings: object, path: str) -> str | None:
    """The transformers settings class that dequantises the weights at `path` as they are read, with a warning; None for
    other weights."""
    method = packed_as(settings)[0]
    if method in DEQUANTISED:
        _log.warning("%s holds weights quantised by %s: they are dequantised, and trained and exported as plain ones",
                     path, method)
    return DEQUANTISED.get(method or "")


def check_no_adapter(path: str) -> None:
    """UserError where a folder holds an adapter's weights beside config.json, so that it is not clear what to load. An
    adapter_config.json alone beside full weights is ignored."""
    folder = Path(path)
    if not (folder / "adapter_config.json").exists():
        return
    weights = sorted(file.name for file in folder.glob("adapter_model.*"))
    is_whole = any(folder.glob("model*.safetensors")) or (folder / INDEX).exists()
    check(is_whole and not weights,
          f"{path} holds an adapter ({', '.join(['adapter_config.json', *weights])}) beside its config.json; remove "
          f"{'these' if weights else 'it'} to load the model alone, or give the adapter's base or the merged model")


def check_index(path: str) -> None:
    """UserError where the index that transformers reads for a folder's weights names a file outside of the folder or a
    missing one; hub ids pass. Indices of other libraries are not read."""
    folder = Path(path)
    if not folder.is_dir():
        return
    named = read_object(folder / CONFIG).get("transformers_weights")
    names = [] if (folder / SINGLE).exists() else [INDEX]
    names += [named] if named and str(named).endswith(".index.json") else []
    names += [] if any(folder.glob("*.safetensors")) else ["pytorch_model.bin.index.json"]
    for index in [folder / name for name in names if (folder / name).exists()]:
        places = read_object(index).get("weight_map")
        check(isinstance(places, dict) and bool(places) and all(isinstance(name, str) for name in places.values()),
              f"{index} is not an index of weight files: its weight_map must name the file of each tensor; download or "
              "export the model anew")
        named = sorted(set(places.values()))
        for name in named:
            check(Path(name).name == name, f"{index}: weight_map names {name!r:.80}, which is outside of the folder; "
                                           "download or export the model anew")
            check(name.endswith(".safetensors") or ".safetensors." not in index.name,
                  f"{index}: weight_map names {name!r:.80}, which is not a safetensors file; download or export the "
                  "model anew")
        absent = [name for name in named if not (index.parent / name).is_file()]
        check(not absent, f"{path} lacks {few(absent, 'weight file')} that {index.name} names; download or export the "
                          "model anew")


def unread(model: nn.Module, read: Collection[str], folder: Path) -> dict[str, str]:
    """name -> file of the tensors in the safetensors of `folder` that the class of `model` declares as unread, such as
    layers for multi-token prediction (mtp). read: names of the tensors that it has read."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if (folder / INDEX).exists() and not (folder / SINGLE).exists():
        files = {name: str(folder / file) for name, file in read_object(folder / INDEX)["weight_map"].items()}
    else:
        files = {name: str(file) for file in (folder / SINGLE,) if file.exists() for name in read_header(file)[1]}
    return {name: file for name, file in files.items() if name not in read and not _TABLES.search(name)
            and any(re.search(pattern, name) for pattern in patterns)}


def check_complete(model: nn.Module, info: Mapping, path: str, new: str | None = None,
                   more: Collection[str] = ()) -> None:
    """Raise UserError where tensors of `model` are missing in its files or have another shape there, or where the files
    hold tensors for layers that would compute without them. Tensors of no layer (a vision tower, another head) are left
    out, with a warning.

    info: transformers' loading info, without tied tensors and those that a class declares as optional.
    new: a pattern of tensors that may be missing, because they are newly initialised. more: those of `unread`, which a
    model with a new head leaves out.
    """
    name = type(model).__name__
    wrong = sorted(k for k in info["mismatched_keys"] if not (new and re.search(new, k[0])))
    check(not wrong, f"{path} does not fit its config.json: {few([_shapes(*each) for each in wrong], 'tensor')}; give "
                     "the config.json that it was saved with")
    buffers = {n for n, _ in model.named_buffers()}  # a model computes them itself: not random numbers
    missing = sorted(k for k in info["missing_keys"] if not (new and re.search(new, k)) and k not in buffers)
    unknown = sorted(k for k in info["unexpected_keys"] if not _TABLES.search(k))
    inside = [k for k in unknown if _is_of_a_layer(model, k)]
    left_out = [*inside, *more] if new else unknown  # a model with a new head leaves another one out
    other = f", but {few(left_out, 'tensor')} that it has no place for" if left_out else ""
    check(not missing, f"{path} lacks {few(missing, 'tensor')} of {name}{other}: they would be random numbers; give a "
                       f"complete {name}")
    check(not inside, f"{path} holds {few(inside, 'tensor')} that {name} would compute without; give the config.json "
                      "that the model was saved with")
    if made := sorted(buffers & set(info["missing_keys"])):
        _log.warning("%s lacks %s of %s: as a new model has them", path, few(made, "buffer"), name)
    if left_out:
        _log.warning("%s holds %s that %s has no place for: left out", path, few(left_out, "tensor"), name)


def few(names: Collection[str], what: str) -> str:
    """The number of `what` and the first three names, for messages."""
    names = list(names)
    more = "" if len(names) <= 3 else ", ..."
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({', '.join(names[:3])}{more})"


def _shapes(name: str, shape: object, expected: object) -> str:
    return f"{name} is {' x '.join(map(str, shape))} and not {' x '.join(map(str, expected))}"


def _is_of_a_layer(model: nn.Module, name: str) -> bool:
    """Whether the innermost existing module on a tensor's path is a layer, and not a container of layers or parts."""
    inner = model
    for part in name.split("."):
        if not isinstance(child := getattr(inner, part, None), nn.Module):
            break
        inner = child
    holders = {id(m) for m in (model, getattr(model, "base_model", None), model.get_decoder(), text_backbone(model))}
    return not isinstance(inner, (nn.ModuleList, nn.ModuleDict)) and id(inner) not in holders
