"""Decoder layers whose weights are in 4 or 8 bits: what a kernel reads, and layers in one call over them."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.engine.decode import runner
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.kernels import REFERENCE, reference
from hybrid_rlhf.models import quantize
from hybrid_rlhf.models.load import ModelConfig, load_causal_lm
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.factories import checkpoints
from tests.factories.tiny import tiny_causal_lm

pytest.importorskip("bitsandbytes")
PROMPTS = [[5, 9, 11], [6], [7, 8, 9, 10, 11, 12]]
GREEDY = SamplingConfig(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_causal_lm(hidden_size=128, intermediate_size=192, head_dim=32).save_pretrained(path)
    return str(path)


def loaded(folder, bits, dtype="bfloat16"):
    return load_causal_lm(ModelConfig(folder, dtype=dtype, load_in_4bit=bits == 4, load_in_8bit=bits == 8))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_kernel_reads_is_what_bitsandbytes_wrote(folder, bits):
    """By its own dequantisation to the model's dtype, bit for bit."""
    layers = quantize.quantized_layers(loaded(folder, bits)).values()
    assert len(layers) == 14
    for layer in layers:
        packed = layer.packed_weight.packed()
        assert (packed.table is None) == (bits == 8)
        for one, again in zip(packed[:2], layer.packed_weight.packed()[:2], strict=True):
            assert one.data_ptr() == again.data_ptr()  # recorded steps keep addresses
        assert torch.equal(reference.unpacked(packed, torch.bfloat16), layer.packed_weight.dequantised(torch.bfloat16))


def test_scales_in_8_bits_of_a_published_model_too(tmp_path):
    base = checkpoints.write("llama3_2_bnb_4bit", tmp_path / "base")
    layers = quantize.quantized_layers(loaded(base, 4)).values()
    assert any(layer.weight.quant_state.nested for layer in layers)
    read = [(layer, packed) for layer in layers if (packed := layer.packed_weight.packed())]
    assert read
    for layer, packed in read:
        assert torch.equal(reference.unpacked(packed, torch.bfloat16), quantize.dequantised(layer).bfloat16())
        assert packed.scales.data_ptr() == layer.packed_weight.packed().scales.data_ptr()


def with_layers(monkeypatch, has_layers):
    make = reference.DecodeLayer if has_layers else None
    ops = REFERENCE._replace(decode_layer=make, linear_dtypes=frozenset([torch.bfloat16]))
    monkeypatch.setattr(runner, "ops_for", lambda _device: ops)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("adapters", [0, 4])
def test_packed_layers_in_one_call_draw_what_the_models_own_layers_do(folder, bits, adapters, monkeypatch):
    found = []
    for has_layers in (True, False):
        with_layers(monkeypatch, has_layers)
        model = loaded(folder, bits)
        if adapters:
            torch.manual_seed(1)
            add_lora(model, LoraConfig(r=adapters))
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=0.1)
        engine = HybridEngine.for_inference(model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
        with torch.no_grad(), engine.inference():
            out = engine.generate(PROMPTS, GREEDY, seed=3)
            assert engine.describe()["fused"].get("decode_layer", 0) == 2 * has_layers
        found.append(out)
    assert found[0].tokens == found[1].tokens
    torch.testing.assert_close(*(torch.tensor(out.logprobs) for out in found), rtol=0, atol=0.03)


def test_other_weights_in_their_place_are_multiplied_by_the_models_own_code(folder, monkeypatch):
    with_layers(monkeypatch, has_layers=True)
    model = loaded(folder, 4)
    engine = HybridEngine.for_inference(model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    with torch.no_grad(), engine.inference():
        engine.generate(PROMPTS, GREEDY, seed=3)
    zeros = {n: torch.zeros_like(quantize.dequantised(m)) for n, m in quantize.quantized_layers(model).items()}
    with quantize.multiplying_by(model, zeros), torch.no_grad():
        with engine.inference():
            other = engine.generate(PROMPTS, GREEDY, seed=3)
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert other.tokens[0][0] == int(logits.argmax())


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_changed_since_they_were_loaded_are_read_as_they_are(folder, bits):
    """As peft leaves them after merging an adapter and taking it out again; and a copy's own weights."""
    import bitsandbytes as bnb

    model = loaded(folder, bits)
    copied = copy.deepcopy(model)
    layer = next(iter(quantize.quantized_layers(model).values()))
    before = layer.packed_weight.packed()
    other = 3 * quantize.dequantised(layer).bfloat16() + 0.1
    kind = bnb.nn.Params4bit if bits == 4 else bnb.nn.Int8Params
    settings = dict(quant_type="nf4") if bits == 4 else dict(has_fp16_weights=False)
    layer.weight = kind(other.cpu(), requires_grad=False, **settings).to("cpu")
    if bits == 8:
        layer.state.CB = layer.state.SCB = None
    packed = layer.packed_weight.packed()
    assert not torch.equal(packed.scales, before.scales)
    assert torch.equal(reference.unpacked(packed, torch.bfloat16), layer.packed_weight.dequantised(torch.bfloat16))
    kept = next(iter(quantize.quantized_layers(copied).values()))
    assert torch.equal(reference.unpacked(kept.packed_weight.packed(), torch.bfloat16),
                       reference.unpacked(before, torch.bfloat16))


def test_a_number_that_is_rounded_to_another_type_first_is_left_to_bitsandbytes(folder):
    model = loaded(folder, 4)
    layer = next(iter(quantize.quantized_layers(model).values()))
    layer.weight.quant_state.dtype = torch.float16
    assert layer.packed_weight.packed() is None


def test_a_layer_whose_forward_was_replaced_runs_by_it(folder, monkeypatch):
    with_layers(monkeypatch, has_layers=True)
    model = loaded(folder, 4)
    layer = model.model.layers[1].mlp.down_proj
    own = layer.forward
    layer.forward = lambda x: -3 * own(x)
    engine = HybridEngine.for_inference(model, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    with torch.no_grad(), engine.inference():
        first = engine.generate(PROMPTS, GREEDY, seed=3).tokens[0][0]
    with torch.no_grad():
        assert first == int(model(torch.tensor([PROMPTS[0]])).logits[0, -1].argmax())


def test_a_kernel_that_reads_no_packed_weights_is_not_asked(folder, monkeypatch):
    class Dense(reference.DecodeLayer):
        @staticmethod
        def takes_packed(_device):
            return False

    ops = REFERENCE._replace(decode_layer=Dense, linear_dtypes=frozenset([torch.bfloat16]))
    monkeypatch.setattr(runner, "ops_for", lambda _device: ops)
    engine = HybridEngine.for_inference(loaded(folder, 4), SimpleNamespace(eos_token_id=None, pad_token_id=0))
    with torch.no_grad(), engine.inference():
        engine.generate(PROMPTS, GREEDY, seed=3)
        assert "decode_layer" not in engine.describe()["fused"]
