"""A trained model as a folder that plain transformers loads: safetensors, tokenizer with template, generation settings.

Adapters are merged in fp32 into the original weights. What was written is loaded again and compared with the live
model before it gets its name; a folder that differs is never left behind.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import nn

from hybrid_rlhf.distributed import barrier, is_main
from hybrid_rlhf.engine.zero import gathered
from hybrid_rlhf.models.lora import lora_layers, merged_state_dict, save_adapter
from hybrid_rlhf.models.saving import reload_like, save


class ExportDiffers(RuntimeError):
    """The folder just written does not give the live model's numbers."""


def export(model: nn.Module, tokenizer, folder: str | Path, eos_ids: list[int]) -> Path:  # noqa: ANN001
    """Write `model` (causal or sequence classification) and `tokenizer` to `folder`, replacing what was there.

    With LoRA the folder holds the merged model, and `adapter` beside it the adapter alone, as peft reads it.
    Only the main process writes; all must call, for under ZeRO 3 each holds a part. Raises ExportDiffers
    if the reloaded folder's outputs differ from the live model's.
    """
    folder = Path(folder)
    with gathered(model):
        if is_main():
            beside = folder.with_name(folder.name + ".tmp")
            shutil.rmtree(beside, ignore_errors=True)
            _write(model, tokenizer, beside, eos_ids)
            _compare(model, beside)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
            if lora_layers(model):
                save_adapter(model, folder.with_name("adapter"))
        barrier()
    return folder


def _write(model: nn.Module, tokenizer, folder: Path, eos_ids: list[int]) -> None:  # noqa: ANN001
    state = merged_state_dict(model) if lora_layers(model) else model.state_dict()
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.eos_token_id = eos_ids if len(eos_ids) > 1 else eos_ids[0]
        settings.pad_token_id = tokenizer.pad_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.eos_token_id = tokenizer.eos_token_id
    save(model, state, folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def _compare(model: nn.Module, folder: Path) -> None:
    """Outputs of the live model and of the folder on one fixed row, within the rounding of the weights' dtype."""
    device = next(model.parameters()).device
    vocab = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(24, device=device)[None] * 7 + 5) % vocab
    was_training = model.training
    model.eval()
    live = model(input_ids=ids, use_cache=False).logits.float()
    model.train(was_training)
    again = reload_like(model, folder).to(device).eval()(input_ids=ids, use_cache=False).logits.float()
    bound = 1e-4 if next(model.parameters()).dtype == torch.float32 else 0.05
    difference = float((live - again).abs().max() / live.abs().max().clamp(min=1e-6))
    if not difference <= bound:
        raise ExportDiffers(f"{folder}: reloaded outputs differ from the live model's by {difference:.3g} (relative); "
                            f"at most {bound} is rounding")
