"""Export a trained model as a folder for plain transformers: safetensors, tokenizer with template, generation config.

The weights have the dtype of the files that training started from, unless model.dtype names another one, or rounding
would lose what was learned. Adapters are merged in fp32 into the original weights, even if the base was quantised in
training: the result is the live model without its quantisation error, and may be quantised again. The written folder is
reloaded and compared with the live model (on the weights that it was merged into) before it gets its final name; one
that differs gets another name. Names and shapes are checked before a run's first step, so that any finished run can be
exported.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import barrier
from hybrid_rlhf.core.own_files import put, replacing
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned, shape_of, without_hooks
from hybrid_rlhf.engine.train.zero import for_main
from hybrid_rlhf.models import saving
from hybrid_rlhf.models.backbone import text_forward, text_logits
from hybrid_rlhf.models.folder_files import refusing
from hybrid_rlhf.models.lora import adapter_parameters, lora_layers, save_adapter
from hybrid_rlhf.models.merging import Weight, merged_name, plain_weights
from hybrid_rlhf.models.quantize import multiplying_by, quantized_layers
from hybrid_rlhf.models.saving import (
    held_in,
    original_weights,
    reload_like,
    reload_mapped,
    save,
    save_beside,
    save_settings,
    share_as,
    share_kept,
)
from hybrid_rlhf.models.transformers_compat import kept_in_fp32
from hybrid_rlhf.models.weight_parts import Gather, layer_by_layer

MERGE_FILE = "merge.json"
# Largest difference of logits by rounding to a dtype, relative to the largest logit.
BOUNDS = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
TEXT = "Once upon a time there was a small house in the woods, and in it lived an old woman with three cats."
SCORED = 4  # rows on which a scalar model is compared
LEAST_KEPT = 0.9  # share of what was learned that must survive rounding to the base's dtype
_log = logging.getLogger(__name__)


class ExportDiffers(UserError):
    """The outputs of the written folder differ from the live model's."""


@torch.no_grad()
def try_export(model: nn.Module, tokenizer, eos_ids: list[int]) -> None:  # noqa: ANN001
    """Dry run of `export` in a temporary folder, without writing the weights; UserError where this model cannot be
    exported. Merges one adapter of each kind and shape."""
    with (refusing(f"a trained {type(model).__name__} could not be exported",
                   "take another model, or another release of transformers"), TemporaryDirectory() as place):
        weights = plain_weights(model, shape_of=shape_of)
        _set_ends(model, tokenizer, eos_ids)
        save_settings(model, weights, Path(place))
        save_beside(model, tokenizer, Path(place))
        type(model.config).from_pretrained(place)
        saving.check_names(model, weights)
        if not is_partitioned(model):
            adapted = [(weights[merged_name(name, layer)], type(layer)) for name, layer in lora_layers(model).items()]
            for weight in {(kind, weight.like.shape): weight for weight, kind in adapted}.values():
                weight.make()
            _logits(model, tokenizer)


def export(model: nn.Module, tokenizer, folder: str | Path, eos_ids: list[int]) -> Path:  # noqa: ANN001
    """Write `model` (causal or sequence classification) and `tokenizer` to `folder`, replacing its contents.

    With LoRA the folder has the merged model, and `adapter` (adapter_ema for model_ema) beside it the adapter and the
    tokenizer, as peft reads them; for a quantised base, merge.json in it says into which weights it was merged
    ("original", or "dequantised" where those are gone) and the relative difference of the live model's logits from the
    written one's. Only the main process writes; all must call, as under ZeRO 3 each holds a shard. Raises ExportDiffers
    if the reloaded folder's outputs differ from the live model's: the adapter is written then, and the folder as
    `folder`_differs. Existing files stay where the disk refuses one.
    """
    folder = Path(folder)
    targets = [folder, *([folder.with_name(folder.name.replace("model", "adapter"))] if lora_layers(model) else [])]

    def write(gather: Gather) -> None:
        with replacing(*targets) as places:
            _write_all(model, tokenizer, places, targets, eos_ids, gather)

    for_main(model, write)
    barrier()
    return folder


def _write_all(model: nn.Module, tokenizer, places: list[Path], targets: list[Path],  # noqa: ANN001
               eos_ids: list[int], gather: Gather) -> None:
    """Write the model's folder and that of an adapter in `places`, and compare the first with the live model. Where
    they differ, both are kept, the first with the suffix _differs."""
    live = _live_logits(model, tokenizer, gather)
    originals = original_weights(model) if quantized_layers(model) else None
    with multiplying_by(model, originals) if originals else nullcontext():
        dtype = _write(model, tokenizer, places[0], eos_ids, gather)
        for adapter in places[1:]:
            with gather(adapter_parameters(model)):
                save_adapter(model, adapter)
            share_as(adapter / "adapter_config.json")
            tokenizer.save_pretrained(adapter)  # peft's AutoPeftModel resizes the embeddings by it
        merged = _live_logits(model, tokenizer, gather) if originals else live  # on the weights that were merged into
        try:
            gap = difference_of(live, _compare(merged, model, tokenizer, places[0], dtype), is_rough(model, dtype))
        except ExportDiffers as error:
            differing = targets[0].with_name(f"{targets[0].name}_differs")
            for place, target in zip(places, (differing, *targets[1:]), strict=True):
                put(place, target)
            raise ExportDiffers(f"{targets[0]}: {error}; nothing is lost: what was written is in {differing}, "
                                "the last checkpoint holds the weights that were trained") from error
    if quantized_layers(model):
        for adapter in places[1:]:
            facts = {"into": "original" if originals else "dequantised", "difference": gap}
            (adapter / MERGE_FILE).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def has_quantized_values(run: str | Path) -> bool:
    """Whether the weights of a run over a quantised base lie on the quantisation grid: the adapter was not merged into
    the original weights."""
    path = Path(run) / "adapter" / MERGE_FILE
    return not path.exists() or json.loads(path.read_text(encoding="utf-8"))["into"] != "original"


def _write(model: nn.Module, tokenizer, folder: Path, eos_ids: list[int],  # noqa: ANN001
           gather: Gather) -> torch.dtype:
    """Write the model's folder; returns the dtype of the weights."""
    weights = {name: replace(weight, make=partial(_gathered, weight, gather))
               for name, weight in plain_weights(model, shape_of=shape_of).items()}
    _set_ends(model, tokenizer, eos_ids)
    dtype = dtype_to_write(model, weights, getattr(model, "file_dtype", None) or model.dtype, model.dtype)
    save(model, in_dtype(model, weights, dtype, model.dtype), folder)
    save_beside(model, tokenizer, folder)
    return dtype


def _set_ends(model: nn.Module, tokenizer, eos_ids: list[int]) -> None:  # noqa: ANN001
    """Set the end tokens and the padding token in the configs of `model`."""
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.eos_token_id = eos_ids if len(eos_ids) > 1 else eos_ids[0]
        settings.pad_token_id = tokenizer.pad_token_id
    config = model.config if hasattr(model.config, "eos_token_id") else model.config.get_text_config()
    config.pad_token_id = tokenizer.pad_token_id
    if not (isinstance(config.eos_token_id, list) and tokenizer.eos_token_id in config.eos_token_id):
        config.eos_token_id = tokenizer.eos_token_id


def _gathered(weight: Weight, gather: Gather) -> Tensor:
    with gather(weight.reads):
        return weight.make()


def dtype_to_write(model: nn.Module, weights: Mapping[str, Weight], wanted: torch.dtype,
                   current: torch.dtype) -> torch.dtype:
    """`wanted`, or the `current` dtype of `weights` where that is not wider, or where `wanted` would lose more than a
    tenth of what was learned (with a warning)."""
    if wanted.itemsize >= current.itemsize:
        return current
    kept = share_kept(model, weights, wanted)
    if kept < LEAST_KEPT:
        _log.warning("exported in %s: rounded to the base's %s, %.0f%% of what was learned would be left",
                     *(str(d).removeprefix("torch.") for d in (current, wanted)), 100 * max(0.0, kept))
        return current
    return wanted


def in_dtype(model: nn.Module, weights: Mapping[str, Weight], dtype: torch.dtype,
             current: torch.dtype) -> dict[str, Weight]:
    """`weights` cast to `dtype`, except those in another dtype than `current`, those that transformers loads in fp32 (a
    router's bias), and those that the base's files have in a wider dtype than `dtype`."""
    is_kept, wider = kept_in_fp32(model, dtype), saving.wider_in_files(model, weights, dtype)
    return {k: w if w.like.dtype != current or is_kept(k) or k in wider else
            replace(w, like=w.like.to(dtype), make=lambda make=w.make: make().to(dtype)) for k, w in weights.items()}


def _row(model: nn.Module, tokenizer) -> Tensor:  # noqa: ANN001
    """(1, T) ids: a text, and the last tokens of the vocabulary, which may be added ones: more than a quarter."""
    vocab = model.get_input_embeddings().num_embeddings
    text = torch.tensor(tokenizer(TEXT).input_ids, dtype=torch.long)
    return torch.cat([text % vocab, torch.arange(vocab)[-4:].repeat(len(text) // 8)])[None]


@torch.no_grad()
def _logits(model: nn.Module, tokenizer) -> Tensor:  # noqa: ANN001
    """A model's logits of one fixed row, in fp32 on the CPU. For a scalar model the scores of SCORED rows: a single one
    may be near zero, and mostly rounding."""
    ids = _row(model, tokenizer).to(next(model.parameters()).device)
    was_training = model.training
    model.eval()
    if hasattr(model, "score"):
        rows = [ids.roll(shift, 1) for shift in range(SCORED)]
        logits = torch.cat([model(input_ids=row, use_cache=False).logits for row in rows])
    else:
        logits = text_logits(model, text_forward(model)(input_ids=ids, use_cache=False))
    model.train(was_training)
    return logits.float().cpu()


def _live_logits(model: nn.Module, tokenizer, gather: Gather) -> Tensor:  # noqa: ANN001
    """`_logits` of the live model; each layer is gathered while it computes."""
    with without_hooks(model), layer_by_layer(model, gather):
        return _logits(model, tokenizer)


def has_experts(model: nn.Module) -> bool:
    """Whether `model` has a mixture of experts."""
    return any(name.endswith("experts") for name, _ in model.named_modules())


def is_rough(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether rounding changes single tokens of the folder's or the live model's logits by far more than the others."""
    return has_experts(model) or {dtype, model.dtype} != {torch.float32}


def difference_of(one: Tensor, other: Tensor, without_worst: bool) -> float:
    """The largest difference of logits (..., V), relative to the largest logit. without_worst: leaves out the worst
    quarter of the tokens, as rounding to 16 bits changes a row's first tokens, whose activations are massive
    (2402.17762), more than all others, and chooses another expert for some; wrong weights affect most tokens.
    """
    by_token = (one - other).abs().amax(-1).flatten()
    if without_worst and bool(by_token.isfinite().all()):
        by_token = by_token.sort().values[: max(1, by_token.numel() * 3 // 4)]
    return float(by_token.max() / one.abs().max().clamp(min=1e-6))


def _compare(live: Tensor, model: nn.Module, tokenizer, folder: Path, dtype: torch.dtype) -> Tensor:  # noqa: ANN001
    """The reloaded folder's logits; ExportDiffers unless they equal `live`, the live model's, within the rounding of
    `dtype`, the folder's, or of the live model's dtype. The folder is loaded into CPU memory, as the GPU may have no
    room for a second model. Where the live model is sharded, CPU memory may be short too: the folder is then
    memory-mapped, and a layer has the live model's dtype while it computes."""
    if is_partitioned(model):
        written = reload_mapped(model, folder, dtype)
        with layer_by_layer(written, partial(held_in, model.dtype, dtype)):
            again = _logits(written, tokenizer)
    else:
        again = _logits(reload_like(model, folder), tokenizer)
    bound = max(BOUNDS[dtype], BOUNDS[model.dtype])
    difference = difference_of(live, again, is_rough(model, dtype))
    if not difference <= bound:
        raise ExportDiffers(f"reloaded outputs differ from the live model's by {difference:.3g} (relative); at most "
                            f"{bound} is rounding: please report it")
    return again
