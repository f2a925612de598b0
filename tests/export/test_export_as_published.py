"""Exports have what a published checkpoint has beside plain weights: settings of generation, ends, quantised bases."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.export.folder import export, try_export
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.models.merging import Weight, plain_weights
from hybrid_rlhf.models.saving import share_kept
from hybrid_rlhf.models.tokenizer import load_tokenizer
from tests.factories import checkpoints
from tests.factories.tiny import save_tiny, tiny_tokenizer


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def changed(folder: str, name: str, **values) -> None:
    path = Path(folder) / name
    path.write_text(json.dumps((read(path) if path.exists() else {}) | values), encoding="utf-8")


def test_sampling_settings_that_transformers_would_not_save_are_exported_as_they_were(tmp_path):
    base = save_tiny(tmp_path / "base")
    changed(base, "generation_config.json", temperature=0.9, top_p=0.6)
    export(load.load_causal_lm(ModelConfig(base)), tiny_tokenizer(), tmp_path / "model", [1, 3])
    written = read(tmp_path / "model/generation_config.json")
    assert (written["temperature"], written["top_p"], written["eos_token_id"]) == (0.9, 0.6, [1, 3])
    assert "do_sample" not in written


@pytest.mark.parametrize(("ends", "expected"), [([1, 3], [1, 3]), ([1, 2], 3), (1, 3)])
def test_a_list_of_ends_in_the_configuration_stays_one_if_the_tokenizer_s_is_in_it(ends, expected, tmp_path):
    base = save_tiny(tmp_path / "base")
    changed(base, "config.json", eos_token_id=ends)
    export(load.load_causal_lm(ModelConfig(base)), tiny_tokenizer(), tmp_path / "model", [1, 3])
    assert read(tmp_path / "model/config.json")["eos_token_id"] == expected


def test_what_rounding_keeps_of_a_tensor_without_dimensions_is_told(tmp_path):
    """Gemma 4's towers clip to such bounds. 16 and 2^-4 in bfloat16 is 16, and 16 and 2^-3 is itself."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(checkpoints.write("gemma4", tmp_path / "base"))
    weights = plain_weights(model)
    name = next(n for n, w in weights.items() if w.like.ndim == 0)
    assert share_kept(model, weights, torch.bfloat16) == 1.0  # nothing has changed
    before = model.state_dict()[name].fill_(16.0)
    model.save_pretrained(tmp_path / "changed")
    model.config.name_or_path = str(tmp_path / "changed")
    for change, kept in ((2.0**-4, 0.0), (2.0**-3, 1.0)):
        value = before.float() + change
        weight = Weight(value.to("meta"), lambda value=value: value, name)
        assert share_kept(model, {name: weight}, torch.bfloat16) == kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_base_published_in_4_bits_is_exported_as_the_plain_weights_that_it_stands_for(dtype, tmp_path, caplog):
    """By transformers' own dequantisation, the adapters' product B A added by hand."""
    import bitsandbytes
    from transformers import AutoModelForCausalLM

    base = checkpoints.write("llama3_2_bnb_4bit", tmp_path / "base")
    model = load.load_causal_lm(ModelConfig(base, load_in_4bit=True, dtype=dtype))
    assert model.dtype == model.lm_head.weight.dtype == model.model.norm.weight.dtype == getattr(torch, dtype)
    add_lora(model, LoraConfig(r=4, alpha=8, target_modules=["q_proj"]))
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    adapters = {name: weight.detach().float() for name, weight in model.named_parameters() if ".lora_" in name}
    tokenizer = load_tokenizer(base)
    export(model, tokenizer, tmp_path / "model", [tokenizer.eos_token_id])
    assert "holds quantised weights: what is exported is what they stand for" in caplog.text
    assert "quantization_config" not in read(tmp_path / "model/config.json")
    assert read(tmp_path / "adapter/merge.json")["into"] == "dequantised"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    written = load_file(tmp_path / "model/model.safetensors")
    bits = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
    assert {type(m).__name__ for m in plain.modules()} & {"Linear4bit"} == set()
    bound = 1e-6 if dtype == "float32" else 2**-8
    for name, layer in bits.named_modules():
        if isinstance(layer, bitsandbytes.nn.Linear4bit):
            expected = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
            if "q_proj" in name:
                up, down = (adapters[f"{name}.lora_{x}.default.weight"] for x in "BA")
                expected += 2 * up @ down
            gap = (written[f"{name}.weight"].float() - expected).abs().max() / expected.abs().max()
            assert float(gap) <= bound, name


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "glm4_6"])
def test_an_untrained_export_is_the_published_folder_again(name, tmp_path):
    """Class, names, dtypes and bits of every tensor, towers and multi-token prediction among them, and every file. From
    5.24 on transformers keeps a router's weight in float32."""
    if (reason := checkpoints.missing(name)) is not None:
        pytest.skip(reason)
    base, made = Path(checkpoints.write(name, tmp_path / "base")), tmp_path / "model"
    model, tokenizer = load.load_causal_lm(ModelConfig(str(base))), load_tokenizer(str(base))
    try_export(model, tokenizer, stop_ids(model, tokenizer))
    export(model, tokenizer, made, stop_ids(model, tokenizer))
    theirs, ours = ({k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
                    for folder in (base, made))
    assert ours.keys() == theirs.keys()
    assert [k for k, v in theirs.items() if not torch.equal(ours[k].double(), v.double())] == []
    assert {k for k, v in theirs.items() if ours[k].dtype != v.dtype} <= {"model.layers.1.mlp.gate.weight"}
    before, after = read(base / "config.json"), read(made / "config.json")
    assert after["architectures"] == before["architectures"]
    ends = (set(read(folder / "generation_config.json")["eos_token_id"]) for folder in (base, made))
    assert set.issubset(*ends)
    files = ({file.name for file in folder.iterdir() if "safetensors" not in file.name} for folder in (base, made))
    assert set.difference(*files) <= {"special_tokens_map.json", "added_tokens.json"}  # in the tokenizer's own file


def test_what_rounding_keeps_is_told_of_a_base_that_was_dequantised_as_it_was_read(tmp_path):
    """Published in FP8, of a model in float32: (c - w) d / d^2, with c the changed weight w + d in bfloat16."""
    model = load.load_causal_lm(ModelConfig(checkpoints.write("ministral3_fp8", tmp_path / "base"), dtype="float32"))
    name, = (name for name in plain_weights(model) if name.endswith("layers.0.mlp.down_proj.weight"))
    before = model.state_dict()[name].clone()
    change = 2.0**-12 * before
    weight = Weight(before.to("meta"), lambda: before + change, name)
    rounded = (before + change).bfloat16().float()
    expected = float(((rounded - before) * change).sum() / (change * change).sum())
    assert share_kept(model, {name: weight}, torch.bfloat16) == pytest.approx(expected, rel=1e-3)
    assert expected != pytest.approx(1.0, rel=0.01)


def test_an_export_of_packed_files_has_their_dtype_and_no_packed_tensors(tmp_path, caplog):
    for name, left_out in (("gpt_oss_mxfp4", False), ("deepseek_v3", True)):
        model = load.load_causal_lm(ModelConfig(base := checkpoints.write(name, tmp_path / name)))
        tokenizer = load_tokenizer(base)
        export(model, tokenizer, tmp_path / f"{name}_made/model", [tokenizer.eos_token_id])
        written = load_file(tmp_path / f"{name}_made/model/model.safetensors")
        assert {v.dtype for v in written.values()} <= {torch.bfloat16, torch.float32}
        assert written["model.embed_tokens.weight"].dtype == torch.bfloat16
        assert not [k for k in written if k.startswith("model.layers.61.") or "scale" in k]
        assert ("the export lacks " in caplog.text) == left_out
        assert "quantization_config" not in read(tmp_path / f"{name}_made/model/config.json")


def test_adapters_change_no_setting_of_the_base_s(tmp_path):
    base = checkpoints.write("smollm3", tmp_path / "base")
    model, tokenizer = load.load_causal_lm(ModelConfig(base)), load_tokenizer(base)
    add_lora(model, LoraConfig(r=2))
    export(model, tokenizer, tmp_path / "model", [tokenizer.eos_token_id])
    written, published = (read(folder / "config.json") for folder in (tmp_path / "model", tmp_path / "base"))
    assert written["pretraining_tp"] == published["pretraining_tp"] == 2


@pytest.mark.parametrize("is_adapter", [False, True])
def test_the_export_command_takes_a_base_published_in_4_bits_and_adapters_over_it(is_adapter, tmp_path, capsys):
    from hybrid_rlhf.commands.export import main
    from hybrid_rlhf.models.lora import save_adapter

    model = checkpoints.write("llama3_2_bnb_4bit", tmp_path / "base")
    if is_adapter:
        live = load.load_causal_lm(ModelConfig(model, load_in_4bit=True))
        add_lora(live, LoraConfig(r=2))
        torch.nn.init.normal_(live.model.layers[0].mlp.up_proj.lora_B["default"].weight, std=0.3)
        save_adapter(live, tmp_path / "adapter")
        model = str(tmp_path / "adapter")
    assert main(["--model", model, "--output_dir", str(tmp_path / "out"), "--gguf", "f16"]) == 0
    assert "holds quantised weights: what is exported is what they stand for" in capsys.readouterr().err
    assert (tmp_path / "out/out-f16.gguf").exists()
    assert "quantization_config" not in read(tmp_path / "out/config.json")
    assert all(v.is_floating_point() for v in load_file(tmp_path / "out/model.safetensors").values())


def test_chat_opens_a_model_published_in_4_bits(tmp_path):
    from hybrid_rlhf.engine.decode.sampling import SamplingConfig
    from hybrid_rlhf.inference.conversation import open_conversation

    talk = open_conversation(checkpoints.write("llama3_2_bnb_4bit", tmp_path / "base"),
                             SamplingConfig(max_new_tokens=4))
    assert "".join(talk.answer("Hello?")) or talk.num_answers == 1
