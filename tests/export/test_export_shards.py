"""An export is made weight by weight and written file by file: the bits of one that is made whole, in little memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.export import folder as export_folder
from hybrid_rlhf.export import folder as exported
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.memory_plan.trace import LiveBytes
from hybrid_rlhf.models import load, saving
from hybrid_rlhf.models.dropout import dropout_in_config
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from hybrid_rlhf.models.merging import plain_weights
from tests.factories.merged import whole_merge
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_scalar_model, tiny_tokenizer

WIDE = dict(hidden_size=64, intermediate_size=128)
# what is loaded, how, and with which adapters
FORMS = {
    "full": (WIDE, {}, {}),
    "full, tied": (dict(WIDE, tie_word_embeddings=True), {}, {}),
    "LoRA, bfloat16": (WIDE, dict(dtype="bfloat16"), dict(r=4)),
    "LoRA and new tokens": (dict(WIDE, tie_word_embeddings=True), {}, dict(r=4, new_ids=[301, 300])),
    "QLoRA, 4 bits": (WIDE, dict(load_in_4bit=True), dict(r=4)),
    "QLoRA, 8 bits": (WIDE, dict(load_in_8bit=True, dtype="bfloat16"), dict(r=4)),
    "fused experts": (dict(kind="mixtral", num_local_experts=4, num_experts_per_tok=2), {}, {}),
}


class Held(LiveBytes):
    """Counts the memory of what is made within the block beside the model itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__((*model.parameters(), *model.buffers()))

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage.device.type != "meta":
            super()._add(storage, size)


def made(form: str, place: Path, **changes) -> torch.nn.Module:
    shape, config, lora = FORMS[form]
    folder = save_tiny(place, vocab_size=302, **shape, **changes)
    model = load.load_causal_lm(ModelConfig(folder, **{"dtype": "float32", **config}))
    if lora:
        add_lora(model, LoraConfig(r=lora["r"]), new_ids=lora.get("new_ids", ()))
    torch.manual_seed(3)
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    return model


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def written_whole(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """By transformers itself, from a state dict that holds all weights."""
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        vars(owner).pop(name, None)
    with dropout_in_config(model):
        model.save_pretrained(folder, state_dict=whole_merge(model))
    return read(folder)


@pytest.mark.parametrize("max_bytes", [2 * 10**9, 40_000])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_bit_for_bit_what_a_whole_merge_writes(form, max_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_BYTES", max_bytes)
    model = made(form, tmp_path / "base")
    saving.save(model, plain_weights(model), tmp_path / "ours")
    ours, theirs = read(tmp_path / "ours"), written_whole(model, tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
    assert (tmp_path / "ours/config.json").read_text() == (tmp_path / "theirs/config.json").read_text()
    if max_bytes > 10**6:
        assert [p.name for p in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]
        one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("ours", "theirs"))
        assert one == other


def test_the_index_names_the_file_of_every_weight_and_transformers_loads_it(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    model = made("LoRA and new tokens", tmp_path / "base")
    monkeypatch.setattr(saving, "MAX_BYTES", 100_000)
    export(model, tiny_tokenizer(), tmp_path / "model", [3])
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    files = {p.name: load_file(p) for p in (tmp_path / "model").glob("*.safetensors")}
    assert sorted(files) == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
    values = [v for held in files.values() for v in held.values()]
    assert index["metadata"] == {"total_parameters": sum(v.numel() for v in values),
                                 "total_size": sum(4 * v.numel() for v in values)}
    assert all(sum(v.nbytes for v in held.values()) <= 100_000 for held in files.values())
    ids = torch.tensor([[5, 300, 7, 301]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["LoRA, bfloat16", "QLoRA, 4 bits", "fused experts"])
def test_no_more_than_a_file_and_a_layer_are_held_while_an_export_is_written(form, tmp_path, monkeypatch):
    """In bytes of operations, as fp32 a layer of the model: what a linear layer's merge takes at once (the weight, B A,
    that scaled, the sum) is less, and fused experts are cut into those of the file a layer at a time."""
    is_linear = form != "fused experts"
    monkeypatch.setattr(saving, "MAX_BYTES", 2 * 64 * 128 * 4)
    model = made(form, tmp_path / "base", num_hidden_layers=24)
    weights = plain_weights(model)
    whole = sum(w.like.nbytes for w in weights.values())
    with Held(model) as live:
        saving.save(model, weights, tmp_path / "model")
    layer = 4 * sum(w.like.numel() for name, w in weights.items() if ".layers.0." in name)
    bound = saving.MAX_BYTES + layer
    assert 0 < live.peak <= bound < whole / 3
    with Held(model) as live:
        kept = whole_merge(model) if is_linear else {}
    assert live.peak > bound or not kept  # what was made whole is seen to be too much


def test_the_model_that_was_written_is_compared_on_the_cpu(tmp_path, monkeypatch):
    """On a card that is full nothing of it would fit beside the live model."""
    moved = []
    real = export_folder.reload_like

    def reloaded(*given):
        again = real(*given)
        again.to = again.cuda = lambda *where, **named: moved.append(where) or again
        return again

    monkeypatch.setattr(export_folder, "reload_like", reloaded)
    export(made("QLoRA, 4 bits", tmp_path / "base"), tiny_tokenizer(), tmp_path / "model", [3])
    assert not moved


@torch.no_grad()
def test_a_reward_model_whose_first_score_is_near_zero_is_exported(tmp_path):
    """In bfloat16, with a head that gives the fixed row of the comparison 0: what is left there is rounding, which
    merging the adapters changes by more than a twentieth of it."""
    model = tiny_scalar_model().bfloat16()
    model.config.pad_token_id = 0
    add_lora(model, LoraConfig(r=4))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.1)
    hidden = model.model(input_ids=exported._row(model, tiny_tokenizer())).last_hidden_state[0, -1].float()
    head = model.score.weight
    head.copy_(head.float() - head.float() @ hidden[:, None] * hidden / hidden.square().sum())
    scores = exported._logits(model, tiny_tokenizer()).flatten()
    assert abs(scores[0]) < 0.05 * scores.abs().max()
    assert (export(model, tiny_tokenizer(), tmp_path / "model", [3]) / "model.safetensors").exists()


def test_the_comparison_keeps_no_activations():
    for model in (tiny_scalar_model(), tiny_causal_lm()):
        model.config.pad_token_id = 0
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not exported._logits(model, tiny_tokenizer()).requires_grad
