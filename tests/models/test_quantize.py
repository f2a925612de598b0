"""4- and 8-bit bases: one product in every mode, gradients through it, and a merge that keeps what was learned."""

import json
import shutil

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.train.parameters import share_unquantised
from hybrid_rlhf.export.folder import export
from hybrid_rlhf.models import load
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from hybrid_rlhf.models.quantize import adamw_8bit, dequantised, quantized_layers
from tests.factories.merged import merged_state_dict
from tests.factories.tiny import save_tiny, tiny_scalar_model, tiny_tokenizer

KINDS = ("4bit", "8bit")
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"), hidden_size=64, intermediate_size=128)


def quantised(folder, kind, **changes):
    return load.load_causal_lm(ModelConfig(folder, dtype="float32", **{f"load_in_{kind}": True}, **changes))


@pytest.mark.parametrize("kind, bound", [("4bit", 0.15), ("8bit", 0.01)])
def test_every_linear_layer_but_the_head_is_held_in_few_bits_near_the_original(folder, kind, bound):
    model, plain = quantised(folder, kind), load.load_causal_lm(ModelConfig(folder))
    layers = quantized_layers(model)
    assert len(layers) == 14 and not any("lm_head" in n or "embed" in n for n in layers)
    for name, layer in layers.items():
        original = plain.get_submodule(name).weight
        error = (dequantised(layer) - original).norm() / original.norm()
        assert 0 < error < bound
        assert layer.weight.numel() * layer.weight.element_size() == original.numel() // (2 if kind == "4bit" else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_training_evaluation_and_a_single_row_are_the_same_product_and_no_byte_moves(folder, kind):
    """bitsandbytes' own layers repack their weights at the first call in eval mode on some CPUs."""
    model = quantised(folder, kind)
    layer = next(iter(quantized_layers(model).values()))
    weight, x = dequantised(layer), torch.randn(3, 64)
    before = layer.weight.data.clone()
    pull = torch.randn(3, layer.out_features)
    for mode in (True, False, True):
        layer.train(mode)
        given = x.clone().requires_grad_()
        layer(given).backward(pull)
        torch.testing.assert_close(given.grad, pull @ weight, rtol=1e-5, atol=1e-6)
        for rows in (x, x[:1]):
            torch.testing.assert_close(layer(rows), rows @ weight.T, rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                torch.testing.assert_close(layer(rows), rows @ weight.T, rtol=1e-5, atol=1e-6)
    assert torch.equal(layer.weight.data, before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_generates_over_a_quantised_base_what_generate_does(folder, kind):
    model = quantised(folder, kind).eval()
    add_lora(model, LoraConfig(r=4))
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    engine = HybridEngine.for_inference(model, tiny_tokenizer())
    with engine.inference():
        ours = engine.generate(prompts, SamplingConfig(max_new_tokens=12, temperature=0)).tokens
    assert engine.describe()["path"] == "native"
    for prompt, tokens in zip(prompts, ours, strict=True):
        theirs = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, eos_token_id=3,
                                pad_token_id=0)[0, len(prompt):]
        assert tokens == theirs.tolist()


FACT = [5, 6, 7, 42, 99, 3]  # what no random model says: after 5 6 7 comes 42 99 and the end


@pytest.mark.parametrize("kind", KINDS)
def test_an_impossible_fact_taught_by_an_adapter_survives_training_merging_and_reloading(folder, kind, tmp_path):
    from transformers import AutoModelForCausalLM

    model = quantised(folder, kind)
    before = {n: dequantised(m) for n, m in quantized_layers(model).items()}
    add_lora(model, LoraConfig(r=8))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids = torch.tensor([FACT])
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model.train()(ids).logits[0, 2:-1], ids[0, 3:])
        loss.backward()
        optimizer.step()
    for name, layer in quantized_layers(model).items():
        assert torch.equal(dequantised(layer), before[name.replace(".base_layer", "")])
    export(model.eval(), tiny_tokenizer(), tmp_path / "model", [3])  # compares the reloaded model's logits itself
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not getattr(plain.config, "quantization_config", None)
    untaught = load.load_causal_lm(ModelConfig(folder))
    assert untaught(ids).logits[0, 2:-1].argmax(-1).tolist() != FACT[3:]
    again = quantised(str(tmp_path / "model"), kind)  # as the base of a next stage
    for taught in (model, plain, again.eval()):
        said = taught.generate(ids[:, :3], do_sample=False, max_new_tokens=3, eos_token_id=3, pad_token_id=0)
        assert said.tolist() == [FACT]
    assert set(merged_state_dict(model)) == set(plain.state_dict())
    for name, layer in lora_layers(model).items():
        taught = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight  # alpha / r is 2
        torch.testing.assert_close(plain.get_submodule(name).weight, untaught.get_submodule(name).weight + taught,
                                   rtol=1e-5, atol=1e-6)
        kept = dequantised(again.get_submodule(name)) - before[name]
        assert (kept * taught).sum() / taught.square().sum() > 0.9  # of the adapter, in its own direction
    merge = json.loads((tmp_path / "adapter" / "merge.json").read_text())
    assert merge["into"] == "original" and 0 < merge["difference"] < (0.5 if kind == "4bit" else 0.05)


def test_without_the_original_weights_an_adapter_is_merged_into_what_is_left_of_them(folder, tmp_path, caplog):
    base = shutil.copytree(folder, tmp_path / "base")
    model = quantised(str(base), "4bit")
    add_lora(model, LoraConfig(r=4))
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    shutil.rmtree(base)
    export(model.eval(), tiny_tokenizer(), tmp_path / "model", [3])
    assert "merged into what the quantisation left" in caplog.text
    plain = load.load_causal_lm(ModelConfig(str(tmp_path / "model")))
    torch.testing.assert_close(plain(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    assert json.loads((tmp_path / "adapter" / "merge.json").read_text())["into"] == "dequantised"


def test_a_scalar_model_keeps_its_head_in_full_precision_and_it_is_not_adapted(tmp_path, folder):
    tiny_scalar_model(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    model = load.load_scalar_model(ModelConfig(str(tmp_path), dtype="float32", load_in_4bit=True))
    add_lora(model, LoraConfig(r=4))
    assert type(model.score) is torch.nn.Linear and len(quantized_layers(model)) == len(lora_layers(model)) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_the_share_that_a_quantisation_leaves_is_that_of_all_but_linear_layers_fused_experts_included(kind, tmp_path):
    folder = save_tiny(tmp_path, kind="mixtral", num_local_experts=4, num_experts_per_tok=2)
    model = quantised(folder, kind)
    add_lora(model, LoraConfig(r=4))
    packed = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32)  # two layers' q, k, v and o
    left = 2 * 300 * 32 + 5 * 32 + 2 * (4 * 32 + 4 * 3 * 32 * 64)  # tables, norms, routers and experts
    engine = HybridEngine.for_inference(model, tiny_tokenizer())
    assert share_unquantised(engine) == pytest.approx(left / (left + packed))


def test_what_cannot_be_trained_is_one_line_before_weights_are_read(folder):
    with pytest.raises(UserError, match="cannot be fully fine-tuned"):
        load.check_lora(ModelConfig("no/folder/at/all", load_in_4bit=True))
    with pytest.raises(UserError, match=r"query_key_value.*q_proj"):
        load.check_lora(ModelConfig(folder, lora=LoraConfig(r=4, target_modules=["query_key_value"])))
    load.check_lora(ModelConfig(folder, load_in_4bit=True, lora=LoraConfig(r=4, target_modules=["q_proj", "up_proj"])))


def test_the_8_bit_optimizer_follows_adamw_and_keeps_its_moments_in_bytes():
    torch.manual_seed(0)
    start, steps = torch.randn(64, 128), 5
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    small = adamw_8bit([{"params": [ours], "weight_decay": 0.1}], 1e-2, (0.9, 0.999), 1e-8)
    plain = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1)
    target = torch.randn(64, 128)
    for _ in range(steps):
        for parameter, optimizer in ((ours, small), (theirs, plain)):
            optimizer.zero_grad()
            ((parameter - target) ** 2).mean().backward()
            optimizer.step()
    moved, expected = (float((p - start).norm()) for p in (ours, theirs))
    assert moved == pytest.approx(expected, rel=0.05)
    assert {v.dtype for v in small.state[ours].values() if torch.is_tensor(v) and v.numel() == ours.numel()} == {
        torch.uint8}
