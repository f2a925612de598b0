"""Products by weights in 4 and 8 bits: their numbers, their memory, who takes the fused one, and adapters over them."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import bitsandbytes
import pytest
import torch
from torch import nn

from hybrid_rlhf.core import torch_compat
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.memory_plan.trace import LiveBytes
from hybrid_rlhf.models import load, quantize
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig, add_lora, lora_layers
from hybrid_rlhf.models.lora_products import fused_adapters
from hybrid_rlhf.models.quantize import RowScaled
from tests.factories.tiny import save_tiny, tiny_tokenizer

KINDS = ("4bit", "8bit")
SHAPE = dict(hidden_size=64, intermediate_size=128)
# Largest relative difference (by norm) from fp64's product with the dequantised weight: half a step of the dtype once
# for the product and once for the row's factor, and for bfloat16 the weight's own rounding in the 4-bit form.
BOUNDS = {torch.float32: 1e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}


class Operations(torch_compat.dispatch_mode()):
    """Counts the operations of a block by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, given=(), named=None):
        self.seen[str(func).removesuffix(".default")] += 1
        return func(*given, **(named or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"), **SHAPE)


@pytest.fixture
def as_on_a_card(monkeypatch):
    monkeypatch.setattr(quantize, "FUSED_ON", ("cpu",))


def quantised(folder, kind, dtype="float32", rank=4):
    model = load.load_causal_lm(ModelConfig(folder, dtype=dtype, **{f"load_in_{kind}": True})).eval()
    torch.manual_seed(3)
    if rank:
        add_lora(model, LoraConfig(r=rank))
    for layer in lora_layers(model).values():
        nn.init.normal_(layer.lora_B["default"].weight, std=0.2)
    return model


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


def row_scaled(out=48, width=40, size=0.3):
    """(weight in int8, the same in fp64), its rows of different sizes."""
    g = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (out, width), generator=g, dtype=torch.int8)
    largest = size * torch.linspace(0.2, 1, out)
    factors = largest / 127
    return RowScaled(lambda: (values, largest)), values.double() * factors.double()[:, None]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_8_bit_product_and_its_gradient_are_the_dequantised_ones_within_rounding(dtype, has_bias):
    packed, weight = row_scaled()
    x, gradient = torch.randn(5, 40, dtype=dtype), torch.randn(5, 48, dtype=dtype)
    bias = torch.randn(48, dtype=dtype) if has_bias else None
    wanted = x.double() @ weight.T + (bias.double() if has_bias else 0)
    assert relative(packed.product(x, bias), wanted) < BOUNDS[dtype]
    assert relative(packed.back(gradient), gradient.double() @ weight) < BOUNDS[dtype]
    assert packed.product(x, bias).dtype == packed.back(gradient).dtype == dtype
    assert torch.equal(packed.dequantised(torch.float32), weight.float())


@pytest.mark.parametrize("size", [0.02, 30.0])
def test_in_float16_the_8_bit_product_ends_where_the_dequantised_one_does(size):
    """The largest float16 is 65,504; x by the int8 values is 80,000 or more here. Nor do small gradients vanish by the
    factors."""
    packed, weight = row_scaled(size=size)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).double()
    x = (x * min(2e3 / x.abs().max(), 2e4 / (x @ weight.T).abs().max())).half()
    assert (x.double() @ packed.dequantised(torch.float64).T).abs().max() / size * 127 > 8e4
    assert relative(packed.product(x, None), x.double() @ weight.T) < BOUNDS[torch.float16]
    gradient = (1e-3 / size * torch.randn(3, 48)).half()
    assert relative(packed.back(gradient), gradient.double() @ weight) < BOUNDS[torch.float16]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_8_bit_product_takes_at_most_5_bytes_a_weight(dtype):
    packed, _ = row_scaled(512, 512)
    for multiply in (lambda x: packed.product(x, None), packed.back):
        x = torch.randn(1, 512, dtype=dtype)
        with LiveBytes() as live:
            multiply(x)
        assert 0 < live.peak <= dtype.itemsize * 512 * 512 + 16 * 512  # the rest: a row of outputs, and the factors
    # with the byte that stays: 5 in fp32, 3 in 16 bits


# -- the sampler's fused product ---------------------------------------------------------------------------------------

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]


def sampled(model, num=6):
    engine = HybridEngine.for_inference(model, tiny_tokenizer())
    with engine.inference():
        return engine.generate(PROMPTS, SamplingConfig(max_new_tokens=num, temperature=0)).tokens


def test_on_a_card_decode_steps_take_the_fused_4_bit_product_and_training_and_scoring_do_not(folder, as_on_a_card):
    fused = "bitsandbytes.gemm_4bit"
    model = quantised(folder, "4bit")
    with Operations() as operations:
        sampled(model, num=1)
    prefill = operations.seen[fused]
    with Operations() as operations:
        sampled(model, num=4)
    assert operations.seen[fused] - prefill == 3 * 14  # products a step
    ids = torch.tensor([[5, 6, 7, 8]])
    with Operations() as operations:
        with torch.no_grad():
            model(ids)
        with fused_adapters(model):
            model(ids).logits.sum().backward()
    assert operations.seen[fused] == 0
    # scoring, forward, and backward, in which nothing below the first q, k and v is trained
    assert operations.seen["bitsandbytes.dequantize_4bit"] == 14 + 14 + 11


def test_the_fused_product_says_what_the_dequantised_one_does(folder, as_on_a_card, caplog):
    ours = sampled(quantised(folder, "4bit"))
    assert not caplog.text
    quantize.FUSED_ON = ()
    with Operations() as operations:
        assert ours == sampled(quantised(folder, "4bit"))
    assert "bitsandbytes.gemm_4bit" not in operations.seen


def fails(*_given, **_named):
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize("change, said", [
    (lambda real: lambda *given, **named: real(*given, **named) * 1.001, "differs by 0.001 of the largest number"),
    (lambda real: fails, "fails (no kernel image is available)")])
def test_a_fused_product_that_is_another_is_refused_at_load_in_one_line(change, said, folder, as_on_a_card, caplog,
                                                                        monkeypatch):
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", change(bitsandbytes.matmul_4bit))
    model = quantised(folder, "4bit")
    assert caplog.text.count("\n") == 1 and said in caplog.text
    with Operations() as operations:
        sampled(model)
    assert "bitsandbytes.gemm_4bit" not in operations.seen


# -- adapters over them ------------------------------------------------------------------------------------------------

def run(model, x, pull, block):
    """Output and gradients of an adapted layer, and the operations that they took."""
    (layer,) = [m for n, m in lora_layers(model).items() if n.endswith("layers.0.mlp.up_proj")]
    model.zero_grad()
    x = x.clone().requires_grad_()
    with block(), Operations() as operations:
        out = layer(x)
        out.backward(pull)
    parts = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    with block(), torch.no_grad():
        unrecorded = layer(x)
    return [out.detach(), unrecorded, x.grad, *(p.grad.clone() for p in parts)], operations.seen


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_over_a_quantised_layer_and_its_gradients_are_peft_s(kind, dtype, has_bias, folder):
    model = quantised(folder, kind, dtype)
    base = model.model.layers[0].mlp.up_proj.base_layer
    if has_bias:
        base.bias = nn.Parameter(torch.randn(128, dtype=model.dtype), requires_grad=False)
    x, pull = torch.randn(2, 3, 64, dtype=model.dtype), torch.randn(2, 3, 128, dtype=model.dtype)
    assert {p.dtype for n, p in model.named_parameters() if ".lora_" in n} == {model.dtype}
    theirs, before = run(model, x, pull, nullcontext)
    ours, after = run(model, x, pull, lambda: fused_adapters(model))
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert relative(found, wanted.double()) < (1e-6 if dtype == "float32" else 8e-3)
    assert after["aten.addmm_"] == 2 and not after["aten.add.Tensor"] and not after["aten.clone"]
    passes = ("aten.add.Tensor", "aten.mul.Tensor", "aten.clone", "aten.add_.Tensor", "aten.mul_.Tensor")
    assert sum(after[name] for name in passes) < sum(before[name] for name in passes)


def test_the_fused_product_s_rounding_over_many_layers_does_not_turn_the_engine_off(folder, as_on_a_card):
    model = quantised(folder, "4bit", "bfloat16")
    calls = []

    def rounded(x, bias, product):  # as much as 36 layers of the right one add up to
        calls.append(1)
        out = product(x, bias)
        return out + 0.3 * out.abs().max() * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)

    for layer in quantize.quantized_layers(model).values():
        layer.packed_weight.fused = partial(rounded, product=layer.packed_weight.product)
    engine = HybridEngine(model, model, max_batch=2)
    with engine.inference():
        said = engine.describe()
        assert said["path"] == "native" and said["not_native"] is None and not calls
        engine.generate([[5, 6, 7]], SamplingConfig(max_new_tokens=3), seed=0)
    assert calls  # which is what samples


@pytest.mark.parametrize("shape", [(48, 32), (32, 64), (3, 40)])  # rows of half a block, of one; no whole blocks at all
def test_a_4_bit_weight_is_its_codes_times_their_blocks_scales(shape):
    packed, state = bitsandbytes.functional.quantize_4bit(torch.randn(shape), quant_type="nf4")
    layer = SimpleNamespace(weight=SimpleNamespace(data=packed, quant_state=state))
    packed = packed.flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[: shape[0] * shape[1]].long()
    scales = state.absmax.repeat_interleave(state.blocksize)[: len(codes)]
    found = quantize._dequantised_4bit(layer, torch.float32)
    torch.testing.assert_close(found, (state.code[codes] * scales).view(shape), rtol=1e-6, atol=1e-7)
