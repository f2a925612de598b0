"""A model has all of its weights from its files, or one line says which it has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.models.load import (
    ModelConfig,
    configuration,
    has_score,
    load_causal_lm,
    load_classifier,
    load_scalar_model,
)
from hybrid_rlhf.models.weights import fingerprint
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


def test_many_missing_tensors_are_three_names_and_a_count(tmp_path):
    def cut(tensors):
        for name in [n for n in tensors if "layers.1." in n]:
            del tensors[name]

    said = refused(changed(tmp_path, cut))
    assert "lacks 9 tensors (model.layers.1.input_layernorm.weight, " in said
    assert said.count("model.layers.1.") == 3


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


def test_a_missing_buffer_is_what_a_new_model_has_and_a_line_says_so(tmp_path, caplog):
    tiny_causal_lm(kind="glm4_moe", first_k_dense_replace=1, moe_intermediate_size=16, n_routed_experts=4,
                   num_experts_per_tok=2, head_dim=8).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_causal_lm(ModelConfig(str(tmp_path)))
    assert torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, torch.zeros(4))
    assert "lacks 1 buffer (model.layers.1.mlp.gate.e_score_correction_bias)" in caplog.text


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
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json holds no JSON object" in refused(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "is not an index of weight files" in refused(tmp_path)


@pytest.mark.parametrize("kept, named", [
    ({"quant_method": "gptq", "bits": 4}, "gptq"), ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
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


def test_the_copy_in_mistral_s_layout_is_no_part_of_the_weights(tmp_path):
    folder = save_tiny(tmp_path)
    alone = fingerprint(folder)
    save_file({"tok_embeddings.weight": torch.ones(4, 4)}, tmp_path / "consolidated.safetensors")
    assert alone is not None and fingerprint(folder) == alone


def test_a_model_of_its_own_code_is_asked_for_its_head_with_that_code(tmp_path):
    folder = configured(tmp_path, **json.loads((Path(save_tiny(tmp_path)) / "config.json").read_text()) | {
        "model_type": "own", "architectures": ["OwnForSequenceClassification"],
        "auto_map": {"AutoConfig": "own.OwnConfig"}})
    (tmp_path / "own.py").write_text("from transformers import LlamaConfig\n\n\n"
                                     "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n")
    assert has_score(folder, trust_remote_code=True)
    with pytest.raises(UserError):
        has_score(folder)
