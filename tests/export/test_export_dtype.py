"""An export has the dtype of the model that training began with, unless that would take away what was learned."""

import json

import pytest
import torch
from safetensors import safe_open

from hybrid_rlhf.export.folder import difference_of, export
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories.architectures import build
from tests.factories.tiny import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base in bfloat16."""
    from transformers import AutoModelForCausalLM

    folder = save_tiny(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)
    AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    return folder


def written(model: torch.nn.Module, folder) -> tuple[set[str], str]:
    """dtypes of the tensors, and what the configuration says."""
    export(model, tiny_tokenizer(), folder, [3])
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118 - not a dict
    return found, json.loads((folder / "config.json").read_text())["dtype"]


def change(model: torch.nn.Module, size: float) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += size * torch.randn_like(weight).sign()
    return model


@pytest.mark.parametrize("dtype, expected", [("auto", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_bfloat16_base_trained_in_float32_is_exported_in_bfloat16_unless_float32_was_asked_for(
        dtype, expected, base, tmp_path):
    model = change(load.load_causal_lm(ModelConfig(base, dtype=dtype)), 0.01)
    assert written(model, tmp_path / "model") == ({f"torch.{expected}"}, expected)
    assert model.config.dtype == model.dtype  # of the live one


def test_adapters_over_a_bfloat16_base_are_merged_into_bfloat16(base, tmp_path):
    model = load.load_causal_lm(ModelConfig(base))
    add_lora(model, LoraConfig(r=4))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    assert written(model, tmp_path / "model") == ({"torch.bfloat16"}, "bfloat16")


def test_what_the_base_s_dtype_would_round_away_is_kept_in_float32_and_said(base, tmp_path, caplog):
    """bfloat16 has 8 bits: of a weight of 0.02 it takes no step under 6e-5."""
    model = change(load.load_causal_lm(ModelConfig(base)), 1e-6)
    assert written(model, tmp_path / "model") == ({"torch.float32"}, "float32")
    assert "exported in float32: rounded to the base's bfloat16," in caplog.text
    assert "of what was learned would be left" in caplog.text


def test_an_untrained_model_keeps_its_dtype(base, tmp_path):
    assert written(load.load_causal_lm(ModelConfig(base)), tmp_path / "model") == ({"torch.bfloat16"}, "bfloat16")


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_what_transformers_keeps_in_float32_beside_bfloat16_weights_is_exported_in_float32(dtype, tmp_path):
    """The bias by which DeepSeek-V3 chooses its experts, on 3.3 and a little: bfloat16 has steps of 1/64 there. From
    5.24 on transformers keeps the router's weight too."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    bias = 3.3 + torch.arange(4) / 10_000
    model = build("deepseek_v3").bfloat16()
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias = bias
    model.save_pretrained(tmp_path / "base")
    live = load.load_causal_lm(ModelConfig(str(tmp_path / "base"), dtype=dtype))
    assert live.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    export(live, tiny_tokenizer(), tmp_path / "model", [3])
    found = load_file(tmp_path / "model/model.safetensors")
    torch.testing.assert_close(found["model.layers.1.mlp.gate.e_score_correction_bias"], bias, rtol=0, atol=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).state_dict()
    assert {k for k, v in found.items() if v.dtype == torch.float32} == {
        k for k, v in theirs.items() if v.dtype == torch.float32}
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize(("is_routed", "wrong", "difference"), [
    (False, 1, 0.5), (True, 1, 0.01), (True, 3, 0.5)], ids=["dense", "one token of four", "most tokens"])
def test_where_rounding_is_rough_a_quarter_of_the_tokens_may_differ(is_routed, wrong, difference):
    live = torch.ones(1, 4, 5)
    live[0, 0, 0] = 2.0  # the largest logit
    again = live + 0.02
    again[0, :wrong, 1] += 0.98
    assert difference_of(live, again, is_routed) == pytest.approx(difference, rel=1e-4)
