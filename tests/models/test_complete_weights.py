"""A model has all of its weights from its files, or one line says which it has not."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.models import load, weight_parts
from hybrid_rlhf.models.load import (
    ModelConfig,
    configuration,
    has_score,
    load_causal_lm,
    load_classifier,
    load_scalar_model,
)
from hybrid_rlhf.models.transformers_compat import each_as_read
from tests.factories.tiny import save_tiny, tiny_causal_lm, tiny_scalar_model

UP = "model.layers.0.mlp.up_proj.weight"
IDS = torch.tensor([[5, 6, 7, 8]])


def changed(path, change, **shape) -> str:
    """A model folder whose tensors `change` has edited in place."""
    folder = save_tiny(path, **shape)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return folder


def configured(folder, **settings) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(folder)


def renamed(tensors) -> None:
    tensors["model.layers.0.mlp.up.weight"] = tensors.pop(UP)


def refused(folder, read=load_causal_lm, **settings) -> str:
    with pytest.raises(UserError) as caught:
        read(ModelConfig(str(folder), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("read", [load_causal_lm, load_scalar_model, load_classifier])
def test_a_tensor_that_is_missing_is_named_and_so_is_the_one_that_may_have_been_it(read, tmp_path):
    said = refused(changed(tmp_path, renamed), read)
    lacks = f"2 tensors ({UP}, score.weight)" if read is load_classifier else f"1 tensor ({UP})"
    assert f"lacks {lacks} of Llama" in said
    assert "(model.layers.0.mlp.up.weight) that it has no place for: they would be random numbers" in said.replace(
        "2 tensors (lm_head.weight, ", "1 tensor (")


def test_a_new_score_head_and_tied_tensors_are_not_missing(tmp_path):
    folder = changed(tmp_path, lambda _tensors: None, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_causal_lm(ModelConfig(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert load_scalar_model(ModelConfig(folder)).score.weight.shape == (1, 32)


def test_a_reward_model_without_its_head_scores_nothing_at_random(tmp_path):
    tiny_scalar_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for read in (load_scalar_model, load_classifier):
        assert "lacks 1 tensor (score.weight) of LlamaForSequenceClassification" in refused(tmp_path, read)
    assert load_scalar_model(ModelConfig(str(tmp_path)), new_head_std=0.1) is not None  # of a critic


def test_a_reward_model_is_a_policy_only_with_a_head_for_words(tmp_path, caplog):
    tiny_scalar_model().save_pretrained(tmp_path / "untied")
    assert "lacks 1 tensor (lm_head.weight)" in refused(tmp_path / "untied")
    tiny_scalar_model(tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    assert load_causal_lm(ModelConfig(str(tmp_path / "tied"))) is not None
    assert "holds 1 tensor (score.weight) that LlamaForCausalLM has no place for: left out" in caplog.text


def test_a_tensor_that_a_layer_would_compute_without_is_refused(tmp_path):
    def biased(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)

    said = refused(changed(tmp_path, biased))
    assert "holds 1 tensor (model.layers.0.self_attn.q_proj.bias) that LlamaForCausalLM would compute without" in said


def test_what_belongs_to_no_layer_is_left_out_with_a_line_and_old_tables_without_one(tmp_path, caplog):
    def more(tensors):
        tensors |= {"v_head.summary.weight": torch.ones(1, 32), "vision_tower.patch.weight": torch.ones(4),
                    "model.layers.2.mlp.up_proj.weight": torch.ones(64, 32)}

    def old(tensors):
        tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
                    "model.layers.0.self_attn.masked_bias": torch.ones(1)}

    plain = load_causal_lm(ModelConfig(changed(tmp_path / "old", old)))
    assert caplog.text == ""
    noted = load_causal_lm(ModelConfig(changed(tmp_path / "more", more)))
    assert "holds 3 tensors (model.layers.2.mlp.up_proj.weight, v_head.summary.weight, " in caplog.text
    assert torch.equal(plain(IDS).logits, noted(IDS).logits)
    assert torch.equal(plain(IDS).logits, tiny_causal_lm()(IDS).logits)


def test_tensors_of_another_shape_are_named_with_both(tmp_path):
    save_tiny(tmp_path)
    said = refused(configured(tmp_path, intermediate_size=48))
    assert "6 tensors (model.layers.0.mlp.down_proj.weight is 32 x 64 and not 32 x 48, " in said
    two = tiny_scalar_model()
    two.score, two.config.num_labels = torch.nn.Linear(32, 2, bias=False), 2
    two.save_pretrained(tmp_path / "two")
    assert "score.weight is 2 x 32 and not 1 x 32" in refused(tmp_path / "two", load_scalar_model)


def test_an_index_that_names_absent_files_says_which(tmp_path):
    tiny_causal_lm().save_pretrained(tmp_path, max_shard_size="20KB")
    names = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(names) > 2
    assert load_causal_lm(ModelConfig(str(tmp_path))) is not None
    (tmp_path / names[1]).unlink()
    assert f"lacks 1 weight file ({names[1]}) that model.safetensors.index.json names" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "is not an index of weight files" in refused(tmp_path)


@pytest.mark.parametrize("kept, named", [
    ({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes in 8bit")])
def test_weights_in_a_format_that_cannot_be_trained_are_refused_by_its_name(kept, named, tmp_path):
    save_tiny(tmp_path)
    configured(tmp_path, quantization_config=kept)
    for read in (load_causal_lm, load_scalar_model, load_classifier, configuration):
        assert f"holds weights quantised by {named}" in refused(tmp_path, read)
    assert "holds weights quantised by" in refused(tmp_path, load_in_4bit=True)


def test_an_index_that_was_left_beside_a_single_file_is_none_of_transformers_business(tmp_path):
    folder = save_tiny(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert torch.equal(load_causal_lm(ModelConfig(folder))(IDS).logits, tiny_causal_lm()(IDS).logits)


def test_a_model_of_its_own_code_is_asked_for_its_head_with_that_code(tmp_path):
    folder = configured(tmp_path, **json.loads((Path(save_tiny(tmp_path)) / "config.json").read_text()) | {
        "model_type": "own", "architectures": ["OwnForSequenceClassification"],
        "auto_map": {"AutoConfig": "own.OwnConfig"}})
    (tmp_path / "own.py").write_text("from transformers import LlamaConfig\n\n\n"
                                     "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n")
    assert has_score(folder, trust_remote_code=True)
    with pytest.raises(UserError):
        has_score(folder)


# -- Weights in parts over processes, before ZeRO takes them: what each keeps, what the rest looks like ----------------


CPU = torch.device("cpu")


@pytest.fixture
def processes(monkeypatch):
    def are(count: int, this: int) -> None:
        monkeypatch.setattr(weight_parts, "world_size", lambda: count)
        monkeypatch.setattr(load, "world_size", lambda: count)
        monkeypatch.setattr(weight_parts, "rank", lambda: this)

    return are


@pytest.mark.parametrize(("this", "kept"), [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6, 7, 8]), (3, [9, 0, 0])])
def test_each_process_keeps_its_piece_of_the_flat_weight_and_the_last_one_ends_with_zeros(processes, this, kept):
    processes(4, this)
    weight = nn.Parameter(torch.arange(10.0).view(2, 5))
    weight_parts.cut(weight, CPU)
    assert weight_parts.part_of(weight).tolist() == kept
    assert weight.shape == (2, 5) and weight.isnan().all()  # whoever computes with it sees that
    assert weight.untyped_storage().nbytes() == 4
    assert weight_parts.take_part(weight).tolist() == kept and weight_parts.part_of(weight) is None


def test_a_model_read_in_parts_keeps_tables_and_norms_whole_and_reads_one_weight_after_the_other(
        processes, tmp_path, monkeypatch):
    save_tiny(tmp_path / "base")
    processes(2, 1)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0")
    model = load.load_causal_lm(ModelConfig(str(tmp_path / "base"), dtype="float32"), in_parts=True)
    whole = tiny_causal_lm(0)
    for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        is_layer_s = "layers" in name and wanted.dim() > 1
        assert (weight_parts.part_of(found) is not None) == is_layer_s, name
        part = wanted.flatten()[wanted.numel() // 2:]
        assert torch.equal(weight_parts.part_of(found), part) if is_layer_s else torch.equal(found, wanted), name
    assert os.environ["HF_DEACTIVATE_ASYNC_LOAD"] == "0"


def test_what_is_called_after_each_weight_finds_none_of_the_later_ones_read(tmp_path):
    save_tiny(tmp_path / "base")
    waiting = []

    def look(model: nn.Module, name: str) -> None:
        waiting.append(sum(p.is_meta for p in model.parameters()))

    with each_as_read(look):
        model = load.load_causal_lm(ModelConfig(str(tmp_path / "base"), dtype="float32"))
    count = len(list(model.parameters()))
    assert waiting == list(range(count - 1, -1, -1))


def test_layer_by_layer_only_the_layer_that_computes_is_whole_beside_what_is_no_layer():
    model, now, most = tiny_causal_lm(0), set(), []
    names = {id(p): n for n, p in model.named_parameters()}

    @contextmanager
    def gather(weights):
        own = {names[id(p)] for p in weights}
        assert not own & now
        now.update(own)
        most.append(set(now))
        yield
        now.difference_update(own)

    ids = torch.arange(4, 12)[None]
    expected = model(input_ids=ids).logits
    with weight_parts.layer_by_layer(model, gather):
        assert torch.equal(model(input_ids=ids).logits, expected)
    outside = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    layers = [{n for n in names.values() if f"layers.{i}." in n} for i in range(2)]
    assert most == [outside, outside | layers[0], outside | layers[1]] and not now
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
