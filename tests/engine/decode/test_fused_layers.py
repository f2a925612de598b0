"""Decoder layers in one call: right by plain torch, equal to the separate kernels, taken only where they are right."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hybrid_rlhf.engine.decode.fused_layers import _ROWS
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.kernels import REFERENCE, cpu, ops_for, reference
from hybrid_rlhf.models.lora import lora_layers
from tests.factories.adapters import base_with
from tests.factories.decoding import plain_logprobs
from tests.factories.plain_layers import numbers_of, plain, plain_opt
from tests.factories.tiny import tiny_causal_lm

GREEDY = SamplingConfig(max_new_tokens=6, temperature=0.0)
PROMPTS = [[5, 9, 11], [6], [7, 8, 9, 10, 11, 12], [13, 5]]
NOTHING_MORE = [None] * 4, [None] * 7  # biases of norms, adapters
SETTINGS = {"eps": 1e-6, "adds_one": False, "scaling": 1.0, "activation": "silu"}
SHAPE = {"hidden_size": 64, "intermediate_size": 136, "head_dim": 16}  # not a multiple of a piece's outputs
SIZES = pytest.mark.parametrize("hidden, inner", [(40, 72), (96, 224)])  # the second is of whole tiles of a matrix unit


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernel(request):
    if request.param == "reference":
        return reference.DecodeLayer
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return cpu.module().DecodeLayer


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("heads, kv_heads, has_extras", [(4, 2, False), (3, 3, True), (4, 1, True)])
@SIZES
def test_a_layer_is_that_of_plain_torch(kernel, dtype, bound, heads, kv_heads, has_extras, hidden, inner):
    dim, rows, columns, numbers = 32, 5, 9, numbers_of(dtype, seed=heads + kv_heads)
    sizes = [(heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim),
             (inner, hidden), (inner, hidden), (hidden, inner)]
    weights = [numbers(*size, scale=size[1] ** -0.5) for size in sizes]
    biases = [numbers(size[0]) if has_extras and i < 3 else None for i, size in enumerate(sizes)]
    norms = [numbers(hidden), numbers(hidden), *((numbers(dim), numbers(dim)) if has_extras else (None, None))]
    layer = kernel(weights, biases, norms, *NOTHING_MORE, eps=1e-6, adds_one=has_extras, scaling=0.2,
                   activation="gelu" if has_extras else "silu")
    assert layer.max_rows >= rows or dtype != torch.float32
    if layer.max_rows < rows:
        pytest.skip("this processor multiplies no bf16 numbers")
    keys, values = (numbers(rows + 1, kv_heads, columns, dim) for _ in range(2))
    before = keys.clone(), values.clone()
    x, angles = numbers(rows, 1, hidden), (numbers(rows, 1, dim), numbers(rows, 1, dim))
    slots, positions = torch.tensor([5, 0, 2, 1, 4]), torch.tensor([0, 8, 3, -1, 5])  # the fourth row is idle
    out = layer(x, *angles, keys, values, slots[:, None], positions, columns)
    assert out.shape == x.shape and out.dtype == dtype
    doubles = [[t if t is None else t.double() for t in ts] for ts in (weights, biases, norms)]
    for row in (0, 1, 2, 4):
        slot, position = slots[row], positions[row]
        want, key, value = plain(x[row, 0].double(), *doubles, [a[row, 0].double() for a in angles],
                                 [c[slot, :, :position].transpose(0, 1).double() for c in before], 0.2, has_extras,
                                 has_extras)
        for ours, theirs in ((out[row, 0], want), (keys[slot, :, position], key), (values[slot, :, position], value)):
            assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max()
        before[0][slot, :, position], before[1][slot, :, position] = keys[slot, :, position], values[slot, :, position]
    assert torch.equal(before[0], keys) and torch.equal(before[1], values)  # nothing else was written


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 0.03)], ids=str)
@SIZES
def test_a_layer_of_opt_with_adapters_is_that_of_plain_torch(kernel, dtype, bound, hidden, inner):
    """The adapters, of unlike ranks and not dense, are as large as the weights; fp32 has none (nor has the kernel)."""
    heads, dim, rows, columns, numbers = 2, 32, 5, 9, numbers_of(dtype, seed=1)
    sizes = [(heads * dim, hidden)] * 3 + [(hidden, heads * dim), None, (inner, hidden), (hidden, inner)]
    weights = [size and numbers(*size, scale=size[1] ** -0.5) for size in sizes]
    biases = [size and numbers(size[0]) for size in sizes]
    ranks = [3, 4, None, 8, None, 16, 5]
    adapters = [r and (numbers(size[1], r, scale=size[1] ** -0.5).T, numbers(size[0], 2 * r)[:, :r], 0.5)
                for r, size in zip(ranks, sizes, strict=True)]
    norms, norm_biases = ([numbers(hidden), numbers(hidden), None, None] for _ in range(2))
    layer = kernel(weights, biases, norms, norm_biases, adapters, eps=1e-5, adds_one=False, scaling=0.2,
                   activation="relu")
    if layer.max_rows < rows:
        pytest.skip("this processor multiplies no bf16 numbers")
    keys, values = (numbers(rows, heads, columns, dim) for _ in range(2))
    before, x = (keys.clone(), values.clone()), numbers(rows, 1, hidden) + 1  # a mean that LayerNorm takes away
    slots, positions = torch.tensor([4, 0, 2, 1, 3]), torch.tensor([0, 8, 3, 2, 5])
    out = layer(x, None, None, keys, values, slots[:, None], positions, columns)
    doubles = [[t if t is None else t.double() for t in ts] for ts in (weights, biases, norms, norm_biases)]
    doubles.append([a and (a[0].double(), a[1].double(), a[2]) for a in adapters])
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        want, key, value = plain_opt(x[row, 0].double(), *doubles, [
            c[slot, :, :position].transpose(0, 1).double() for c in before], 0.2)
        for ours, theirs in ((out[row, 0], want), (keys[slot, :, position], key), (values[slot, :, position], value)):
            assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, kv_heads, hidden, inner", [(4, 1, 96, 224), (1, 1, 40, 96), (3, 3, 64, 72)])
def test_a_row_of_a_layer_does_not_depend_on_the_rows_beside_it(dtype, heads, kv_heads, hidden, inner):
    """More rows than tiles hold; keys and values narrower than a tile; some products by tiles, and some not."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    dim, rows, numbers = 16, 53, numbers_of(dtype, seed=0)
    sizes = [(heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim),
             (inner, hidden), (inner, hidden), (hidden, inner)]
    weights = [numbers(size[0], size[1] + 8, scale=size[1] ** -0.5)[:, 3:-5] for size in sizes]  # as a shard's view
    layer = cpu.module().DecodeLayer(weights, [None] * 7, [numbers(hidden), numbers(hidden), None, None], *NOTHING_MORE,
                                    **SETTINGS)
    if layer.max_rows < rows:
        pytest.skip("this processor multiplies no bf16 numbers")
    x, cosines, sines = numbers(rows, 1, hidden), numbers(rows, 1, dim), numbers(rows, 1, dim)
    keys, values = (numbers(rows, kv_heads, 4, dim) for _ in range(2))

    def computed(start, count):
        own, at = (keys.clone(), values.clone()), slice(start, start + count)
        out = layer(x[at], cosines[at], sines[at], *own, torch.arange(rows)[at, None], torch.full((count,), 3), 4)
        return out, own[0][at], own[1][at]

    whole = computed(0, rows)
    for start, count in ((0, 1), (1, 7), (8, 32), (40, 13)):
        assert all(torch.equal(part, all_of[start:start + count])
                   for part, all_of in zip(computed(start, count), whole, strict=True))


def test_a_small_layer_takes_many_rows_and_a_large_one_what_our_product_is_good_for(kernel):
    """Above that many rows torch's product is faster, but a small layer would pay more for the way through Python."""
    def most(hidden, dtype):
        eye = torch.eye(hidden, dtype=dtype)
        norms = [torch.ones(hidden, dtype=dtype)] * 2 + [None] * 2
        return kernel([eye] * 7, [None] * 7, norms, *NOTHING_MORE, **SETTINGS).max_rows

    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and most(8, dtype) == 0:
            continue  # this processor multiplies no bf16 numbers
        assert most(64, dtype) >= 512
        assert most(1024, dtype) == 48 or kernel is reference.DecodeLayer


def test_what_does_not_fit_a_layer_is_an_error():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    make, eye = cpu.module().DecodeLayer, torch.eye(8)
    with pytest.raises(ValueError, match="do not fit each other"):
        make([eye] * 6 + [torch.zeros(8, 4)], [None] * 7, [torch.ones(8)] * 2 + [None] * 2, *NOTHING_MORE, **SETTINGS)
    layer = make([eye] * 7, [None] * 7, [torch.ones(8)] * 2 + [None] * 2, *NOTHING_MORE, **SETTINGS)
    cache = torch.zeros(2, 2, 3, 4)
    step = torch.zeros(1, 1, 8), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4), cache, cache.clone()
    with pytest.raises(IndexError, match="position 3; width is 3"):
        layer(*step, torch.tensor([[0]]), torch.tensor([3]), 3)
    with pytest.raises(IndexError, match="page 2 of 2"):
        layer(*step, torch.tensor([[2]]), torch.tensor([0]), 3)
    with pytest.raises(ValueError, match="do not fit the layer"):
        layer(*step[:3], cache[:, :1], cache[:, :1], torch.tensor([[0]]), torch.tensor([0]), 3)
    with pytest.raises(ValueError, match="an adapter must be of its weight's dtype and fit it"):
        make([eye] * 7, [None] * 7, [torch.ones(8)] * 2 + [None] * 2, [None] * 4,
             [(torch.zeros(2, 8), torch.zeros(9, 2), 1.0)] + [None] * 6, **SETTINGS)
    with pytest.raises(ValueError, match="no kernel has the activation mish"):
        make([eye] * 7, [None] * 7, [torch.ones(8)] * 2 + [None] * 2, *NOTHING_MORE,
             **SETTINGS | {"activation": "mish"})


def engine(model):
    return HybridEngine.for_inference(model, SimpleNamespace(eos_token_id=None, pad_token_id=0))


def drawn(made, has_layers, sampling=GREEDY):
    runner = made._runner
    forms = runner.layers
    try:
        runner.layers = forms if has_layers else []
        with made.inference():
            out = made.generate(PROMPTS, sampling, seed=3)
        return out.tokens, out.logprobs
    finally:
        runner.layers = forms


def farthest(model, tokens, logprobs):
    """The largest difference between sampled log-probabilities and those of transformers' plain forward."""
    return max(float((plain_logprobs(model, prompt, row) - torch.tensor(found)).abs().max())
               for prompt, row, found in zip(PROMPTS, tokens, logprobs, strict=True))


def needs_layers(dtype):
    ops, eye, one = ops_for("cpu"), torch.eye(8, dtype=dtype), torch.ones(8, dtype=dtype)
    if (ops.decode_layer is None or dtype not in ops.linear_dtypes
            or not ops.decode_layer([eye] * 7, [None] * 7, [one, one, None, None], *NOTHING_MORE, **SETTINGS).max_rows):
        pytest.skip(f"{ops.name} computes no layers of {dtype}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, inner", [("llama", 136), ("mistral", 136), ("qwen2", 160), ("qwen3", 136)])
def test_layers_in_one_call_give_the_bits_of_separate_kernels(kind, inner, dtype):
    needs_layers(dtype)
    made = engine(tiny_causal_lm(kind=kind, **SHAPE | {"intermediate_size": inner}).to(dtype))
    with made.inference():
        assert made.describe()["fused"]["decode_layer"] == 2
    assert drawn(made, True) == drawn(made, False)
    mixed = SamplingConfig(max_new_tokens=6)
    assert drawn(made, True, mixed) == drawn(made, False, mixed)


def test_layers_of_opt_in_one_call_generate_what_transformers_does():
    needs_layers(torch.float32)
    model = tiny_causal_lm(kind="opt", ffn_dim=136, hidden_size=64, word_embed_proj_dim=64)
    for parameter in model.parameters():  # biases and LayerNorms begin at 0 and 1
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1 and parameter.mean() > 0.5), std=0.1)
    made, wanted = engine(model), by_transformers(model)
    with made.inference():
        assert made.generate(PROMPTS, GREEDY).tokens == wanted
        assert made.describe()["fused"]["decode_layer"] == 2


@pytest.mark.parametrize("kind, dtype, bound", [("llama", torch.bfloat16, 0.06), ("qwen3", torch.bfloat16, 0.06),
                                                ("opt", torch.bfloat16, 0.06), ("llama", torch.float32, 1e-3)])
def test_layers_with_adapters_in_one_call_follow_the_adapter_that_is_active(kind, dtype, bound):
    """For each of two adapters the model's own log-probabilities, and (but for OPT, whose LayerNorm torch rounds
    otherwise) the bits of separate kernels; without any, and merged, the model's own way."""
    needs_layers(dtype)
    changes = {"ffn_dim": 136, "word_embed_proj_dim": 64, "hidden_size": 64} if kind == "opt" else SHAPE
    model = base_with("one", "two", kind=kind, **changes).to(dtype)
    layers = lora_layers(model).values()
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def activate(name):
        for layer in layers:
            layer.set_adapter(name)

    activate("one")
    made = engine(model)
    with made.inference():
        assert made.describe()["fused"]["decode_layer"] == 2
    found = {}
    for name in ("one", "two"):
        activate(name)
        found[name] = drawn(made, True)
        assert kind == "opt" or found[name] == drawn(made, False)
        assert farthest(model, *found[name]) < bound
    for layer in layers:
        layer.enable_adapters(False)
    found["none"] = drawn(made, True)
    assert found["none"] == drawn(made, False)
    for layer in layers:
        layer.enable_adapters(True)
    assert farthest(model, *found["one"]) > 0.2  # what a forgotten adapter would do
    with made.inference():  # an adapter that is taken away meanwhile is not used any more
        for layer in layers:
            layer.enable_adapters(False)
        assert made.generate(PROMPTS, GREEDY).tokens == found["none"][0]
    assert len({str(tokens) for tokens, _ in found.values()}) == 3
    for layer in layers:
        layer.enable_adapters(True)
        layer.merge()
    assert drawn(made, True) == drawn(made, False)


@pytest.mark.parametrize("kind, changes", [("gemma2", {}),
                                           ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32,
                                                    "do_layer_norm_before": False}),
                                           ("granite", {"residual_multiplier": 0.5}), ("olmo2", {})])
def test_layers_of_another_form_are_left_to_the_model(kind, changes):
    made = engine(tiny_causal_lm(kind=kind, **changes))
    with made.inference():
        assert "decode_layer" not in made.describe()["fused"]


def test_weights_are_read_where_they_are_and_hooks_and_adapters_are_respected():
    needs_layers(torch.float32)
    model = tiny_causal_lm(**SHAPE)
    made = engine(model)
    with made.inference():
        before = made.generate(PROMPTS, GREEDY).tokens
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.normal_()
    with made.inference():
        after = made.generate(PROMPTS, GREEDY).tokens
    assert after != before
    assert drawn(made, False)[0] == after
    calls = []
    handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    with made.inference():
        assert made.generate(PROMPTS, GREEDY).tokens == after
    assert len(calls) > 1  # prompts and steps
    handle.remove()
    assert all("forward" not in vars(m) for m in model.modules())


def over_slots(model, monkeypatch, layer=reference.DecodeLayer):
    """The engine of a model in inference mode's first use, with whole layers in fp32 wherever the test runs."""
    ops = REFERENCE._replace(linear=F.linear, linear_dtypes=frozenset([torch.float32]), decode_layer=layer)
    monkeypatch.setattr("hybrid_rlhf.engine.decode.runner.ops_for", lambda _device: ops)
    made = engine(model)
    with made.inference():
        tokens = made.generate(PROMPTS, GREEDY).tokens
    return made.describe(), tokens


def by_transformers(model):
    return [model.generate(torch.tensor([p]), do_sample=False, max_new_tokens=6, eos_token_id=None,
                           pad_token_id=0)[0, len(p):].tolist() for p in PROMPTS]


def test_layers_that_rotate_a_part_of_each_head_are_left_to_the_model(monkeypatch):
    """GLM-4.5's dense layers among those with experts: Llama's parts, but angles for half of a head."""
    model = tiny_causal_lm(kind="glm4_moe", first_k_dense_replace=1, moe_intermediate_size=16, n_routed_experts=4,
                           num_experts_per_tok=2, head_dim=8)
    about, tokens = over_slots(model, monkeypatch)
    assert about["path"] == "native"
    assert about["refused"] == {}
    assert "decode_layer" not in about["fused"]
    assert tokens == by_transformers(model)


def test_a_kernel_that_fails_is_said_and_one_that_refuses_a_layer_is_not(monkeypatch, caplog):
    class Failing(reference.DecodeLayer):
        error = RuntimeError("ptxas found no card\nmore")

        def __call__(self, *inputs):
            raise self.error

    model = tiny_causal_lm()
    about, tokens = over_slots(model, monkeypatch, Failing)
    assert about["refused"] == {"decode layers": "RuntimeError: ptxas found no card"}
    assert "keeps its own decode layers in inference mode: RuntimeError: ptxas found no card" in caplog.text
    assert tokens == by_transformers(model)
    Failing.error = ValueError("weights that are not dense")
    about, _ = over_slots(tiny_causal_lm(), monkeypatch, Failing)
    assert about["refused"] == {} and "decode_layer" not in about["fused"]


def test_layers_that_are_wrong_together_are_said_to_be_and_the_model_generates_without_them(monkeypatch, caplog):
    class RightOnlyInTheTrial(reference.DecodeLayer):
        def __call__(self, hidden, cosines, sines, keys, *others):
            out = super().__call__(hidden, cosines, sines, keys, *others)
            return out if len(keys) == _ROWS else out + 1

    model = tiny_causal_lm()
    about, tokens = over_slots(model, monkeypatch, RightOnlyInTheTrial)
    assert about["path"] == "native"
    assert "differ from the plain forward" in about["refused"]["decode layers"]
    assert "decode_layer" not in about["fused"]
    assert "keeps its own decode layers in inference mode: its logits over slots differ" in caplog.text
    assert tokens == by_transformers(model)
