"""hybrid-rlhf export: a run, model or adapter as a folder for plain transformers, and for llama.cpp and Ollama."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_rlhf.core.config import UserError, check, command_flags, parse_command
from hybrid_rlhf.core.options import expanded, nearest_path
from hybrid_rlhf.core.own_files import replacing

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from hybrid_rlhf.run.runfile import RunRecord


def parse(argv: list[str] | None) -> argparse.Namespace:
    flags = command_flags("export", __doc__)
    flags.add_argument("--model", type=expanded, metavar="DIR",
                       help="a run's folder, its model/ or its adapter/, one of its checkpoints, any LoRA adapter")
    flags.add_argument("--output_dir", type=expanded, metavar="DIR", help="new or empty folder for the result")
    flags.add_argument("--base", type=expanded, metavar="DIR",
                       help="base model of an adapter, if it is not where its file says")
    flags.add_argument("--gguf", metavar="TYPE", help="also one GGUF file for llama.cpp: f32, f16, bf16 or q8_0")
    flags.add_argument("--ollama", action="store_true", help="also a Modelfile (and a GGUF file if none is asked)")
    flags.add_argument("--push_to_hub", metavar="ID", help="upload the folder to this hub id (private; needs a login)")
    flags.add_argument("--public", action="store_true", help="make the uploaded repository public")
    options = parse_command(flags, argv)
    check(options.model is not None, "export: no model; give --model DIR, such as --model outputs/demo/ppo")
    check(options.output_dir is not None, "export: no place for the result; give --output_dir DIR")
    return options


def find(path: str) -> tuple[Path, RunRecord | None]:
    """The folder with weights (model, adapter or checkpoint) for `path`, and the record of its run, if any; None for a
    checkpoint, whose run may still be running."""
    from hybrid_rlhf.models.load import refuse_gguf
    from hybrid_rlhf.models.lora import is_adapter
    from hybrid_rlhf.run.checkpoint import is_checkpoint
    from hybrid_rlhf.run.runfile import is_run, read_run

    folder = Path(path)
    check(folder.is_dir(), f"export: {path} is not a folder{nearest_path(path)}; give a run's folder, its model/ "
                            "or its adapter/")
    if is_checkpoint(folder):
        return folder, None
    run = next((p for p in (folder, folder.parent) if is_run(p)), None)
    record = read_run(run) if run else None
    if run == folder:
        check(record.is_finished or record.left_early,
              f"export: the {record.stage} run in {path} is not finished ({record.status}); "
              f"{record.cure}")
        if record.left_early:
            print(f"note: the {record.stage} run in {path} {record.left_early}", file=sys.stderr)
        folder = folder / "model"
    refuse_gguf(folder)
    check((folder / "config.json").exists() or is_adapter(folder),
          f"export: {path} holds neither a model (config.json) nor an adapter (adapter_config.json); "
          "give a run's folder, its model/ or its adapter/")
    return folder, record


def export(options: argparse.Namespace) -> list[Path]:
    """Export by the flags; returns the paths that were written. Leaves nothing in output_dir if a check fails."""
    from hybrid_rlhf.export.gguf import check_convertible, write_gguf

    source, record = find(options.model)
    target = Path(options.output_dir)
    check(not target.exists() or (target.is_dir() and not any(target.iterdir())),
          f"export: {target} is not empty; choose a new folder")
    check(target.resolve() != source.resolve(), "export: --output_dir is the model itself; choose a new folder")
    base = _base_of(source, options.base)
    wanted = options.gguf or ("f16" if options.ollama else None)
    if wanted and (base or (source / "config.json").exists()):  # a checkpoint is checked after its model is written
        check_convertible(base or source, wanted)
    with replacing(target.resolve()) as (beside,):
        beside.mkdir(parents=True)
        _write(source, base, beside, record)
        written = [target]
        if wanted:
            weights = write_gguf(beside, beside / f"{target.name}-{wanted}.gguf", wanted, target.name)
            written.append(target / weights.name)
        if options.ollama:
            written.append(target / _modelfile(beside, weights.name).name)
        check(not target.exists() or not any(target.iterdir()),
              f"export: {target} has been filled meanwhile; choose a new folder")
    return written


def _base_of(source: Path, option: str | None) -> str | None:
    """The base model of an adapter; None where `source` is a full model or a checkpoint."""
    from hybrid_rlhf.models.load import check_folder
    from hybrid_rlhf.models.lora import base_of
    from hybrid_rlhf.run.checkpoint import is_checkpoint

    if (source / "config.json").exists() or is_checkpoint(source):
        check(option is None, f"export: {source} is not an adapter, and --base is for adapters; leave it out")
        return None
    base = option or base_of(source)
    check(bool(base), f"export: the adapter {source} does not say which model it is for; give --base DIR")
    check_folder(base)
    return base


def _write(source: Path, base: str | None, folder: Path, record: RunRecord | None) -> None:
    """Write the merged model, tokenizer and card in `folder`, and compare it in a fresh process with the original."""
    from hybrid_rlhf.export import verify
    from hybrid_rlhf.export.model_card import write_card
    from hybrid_rlhf.run.checkpoint import is_checkpoint

    if is_checkpoint(source):
        from hybrid_rlhf.training import checkpoint_models

        checkpoint_models.write(source, folder)
        print(f"the model as it was at {source.name}", file=sys.stderr)
        return
    live, class_name, dtype = _write_model(source, base, folder)
    gc.collect()  # the model and peft's wrapper reference each other
    difference = verify.compare(live, folder, class_name, dtype)
    print(f"reloaded in a fresh process: tokens equal, logits within {difference:.2g} (relative)", file=sys.stderr)
    if record is not None:
        write_card(folder, Path(record.output_dir).resolve().name, asdict(record))


def _write_model(source: Path, base: str | None, folder: Path) -> tuple[dict[str, Tensor], str, torch.dtype]:
    """Write the model, merged in fp32 weight by weight from the memory-mapped files, and its tokenizer. Returns the
    original model's outputs (verify.answers), its class and the dtype that was written."""
    import torch

    from hybrid_rlhf.export import verify
    from hybrid_rlhf.export.folder import dtype_to_write, in_dtype
    from hybrid_rlhf.models.load import as_published, configuration, load_causal_lm, load_scalar_model, prepare
    from hybrid_rlhf.models.lora import expert_weights, load_adapter, task_of
    from hybrid_rlhf.models.merging import plain_weights
    from hybrid_rlhf.models.saving import save, save_beside
    from hybrid_rlhf.models.tokenizer import load_tokenizer
    from hybrid_rlhf.models.transformers_compat import as_stored

    place = as_published(base or str(source), dtype="float32")
    settings = configuration(place)
    is_reward = any("SequenceClassification" in name for name in settings.architectures or [])
    is_reward = is_reward or bool(base and task_of(source) == "SEQ_CLS")
    with nullcontext() if place.quantize else as_stored():
        model = (load_scalar_model if is_reward else load_causal_lm)(place).eval()
    if place.quantize:
        print(f"{place.model_name_or_path} holds quantised weights: what is exported is what they stand for, as plain "
              "weights", file=sys.stderr)
    if expert_weights(model):
        print(f"files have the experts of {type(model).__name__} one by one: all "
              f"{sum(p.nbytes for p in model.parameters()) / 2**30:.1f} GiB of it are held in memory", file=sys.stderr)
    has_tokenizer = any((source / name).exists() for name in ("tokenizer.json", "tokenizer.model"))
    tokenizer = load_tokenizer(str(source) if has_tokenizer else base)
    if base:
        prepare(model, place, len(tokenizer))
        if is_reward:
            model.score.float()  # to be replaced by the adapter's head
        load_adapter(model, source, "default", torch.float32)
    live = verify.answers(model, tokenizer)
    dtype = settings.dtype or settings.get_text_config().dtype or torch.float32
    weights = plain_weights(model, torch.float32)
    dtype = dtype_to_write(model, weights, dtype, torch.float32) if base else dtype
    save(model, in_dtype(model, weights, dtype, torch.float32), folder)
    save_beside(model, tokenizer, folder)
    return live, type(model).__name__, dtype


def _modelfile(folder: Path, weights: str) -> Path:
    """Write a Modelfile beside the weights, with the chat template where Ollama's language can express it."""
    from hybrid_rlhf.data.turns import render
    from hybrid_rlhf.export import ollama
    from hybrid_rlhf.models.tokenizer import load_tokenizer, turn_ends

    tokenizer = load_tokenizer(str(folder))
    bos = tokenizer.bos_token or ""
    turns = ollama.turns_of(lambda m: render(tokenizer, m, add_generation_prompt=True), bos) \
        if tokenizer.chat_template else None
    starts_with_bos = bool(bos) and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    if turns and starts_with_bos and turns.opening == bos:  # llama.cpp adds the BOS token
        turns = replace(turns, opening="")
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ends = tokenizer.convert_ids_to_tokens(turn_ends(tokenizer))
    text = ollama.modelfile(f"./{weights}", turns, list(dict.fromkeys([tokenizer.eos_token, *ends])),
                            {"num_ctx": min(4096, settings["max_position_embeddings"])})
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    return folder / "Modelfile"


def push(folder: Path, name: str, *, is_public: bool) -> str:
    """Upload `folder` to the hub; returns its URL. Raises UserError with the hub's message."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        api.create_repo(name, private=not is_public, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message="hybrid_rlhf export"))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise UserError(f"export: the hub refused {name}: {' '.join(str(error).split())}; the folder {folder} is "
                        "complete") from error


def main(argv: list[str] | None = None) -> int:
    """The entry point; returns 0, or 1 where the exported model differs. Raises UserError."""
    from hybrid_rlhf.export.folder import ExportDiffers
    from hybrid_rlhf.run.signals import stops_as_by_hand

    try:
        options = parse(argv)
        with stops_as_by_hand():
            written = export(options)
        for path in written:
            print(path)
        if options.push_to_hub:
            print(push(Path(options.output_dir), options.push_to_hub, is_public=options.public))
    except ExportDiffers as error:  # a bug of ours, or a model that cannot be exported; nothing was written
        print(f"error: {error}; nothing was written", file=sys.stderr)
        return 1
    return 0
