"""Fused operations: right by their definition, found by trial, and gone when the mode ends."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybrid_rlhf.kernels import cpu, reference
from hybrid_rlhf.kernels.fusions import find_fusions
from hybrid_rlhf.kernels.ops import Fused, Updates
from tests.factories.architectures import build
from tests.factories.token_scores import assert_as_in_wide_numbers

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
REFERENCE = Fused(reference.rms_norm, reference.gated, reference.rotary)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def fused(request):
    if request.param == "reference":
        return REFERENCE
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return cpu.load().fused


def assert_same(ours, formula, leaves, by_out):
    """Values and gradients, the formula's in fp64."""
    def computed(function, dtype=None):
        own = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in leaves]
        out = function(*own)
        return out.detach(), torch.autograd.grad(out, own, by_out.to(dtype or by_out.dtype))

    (value, gradients), (wide_value, wide_gradients) = computed(ours), computed(formula, torch.float64)
    for found, wanted in zip((value, *gradients), (wide_value, *wide_gradients), strict=True):
        assert found.dtype == by_out.dtype and found.shape == wanted.shape
        assert (found.double() - wanted).norm() <= 3 * DTYPES[by_out.dtype] * wanted.norm()
    return value, wide_value


def near(ours, want, dtype):
    return bool(((ours.double() - want).abs() <= 2.5 * DTYPES[dtype] * want.abs() + 1e-6).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 5, 16, 40, 192, 2050])
@pytest.mark.parametrize("adds_one", [False, True])
def test_norms_and_their_gradients_are_those_of_the_formula(fused, dtype, dim, adds_one):
    g = torch.Generator().manual_seed(dim)
    x, weight = torch.randn(3, 70, dim, generator=g).to(dtype), torch.randn(dim, generator=g).to(dtype)
    by_out = torch.randn(3, 70, dim, generator=g).to(dtype)

    def formula(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + adds_one)

    if dim > 1:  # of one number the gradient is next to nothing
        found = assert_same(lambda x, w: fused.rms_norm(x, w, 1e-5, adds_one), formula, [x, weight], by_out)
        assert near(*found, dtype)
    turned = x.transpose(0, 1)
    assert near(fused.rms_norm(turned, weight, 1e-5, adds_one), formula(turned.double(), weight.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gates_and_their_gradients_are_those_of_the_formula(fused, dtype, is_gelu):
    g = torch.Generator().manual_seed(1)

    def formula(gate, up):
        return (F.gelu(gate, approximate="tanh") if is_gelu else gate * gate.sigmoid()) * up

    for limit in (12, 120):  # more than one piece, and far beyond what an exponential holds
        gate = torch.cat([torch.linspace(-limit, limit, 801), torch.zeros(3)]).to(dtype).expand(21, -1)
        leaves = [gate, torch.randn(21, 804, generator=g).to(dtype)]
        by_out = torch.randn(21, 804, generator=g).to(dtype)
        assert near(*assert_same(lambda gate, up: fused.gated(gate, up, is_gelu), formula, leaves, by_out), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 8, 20, 64])
def test_rotary_positions_turn_each_pair_by_its_angle_and_gradients_back(fused, dtype, dim):
    g = torch.Generator().manual_seed(dim)
    leaves = [torch.randn(3, 5, h, dim, generator=g).to(dtype).transpose(1, 2) for h in (4, 2)]
    angles = torch.randn(1, 5, dim // 2, generator=g).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)

    def joined(pair):
        return torch.cat(pair, 1)

    def formula(query, key):
        def turned(x):
            turn = torch.complex(cosines.double(), sines.double())[:, None, :, : dim // 2]
            found = torch.complex(*x.chunk(2, -1)) * turn
            return torch.cat([found.real, found.imag], -1)
        return joined((turned(query), turned(key)))

    value, wanted = assert_same(lambda q, k: joined(fused.rotary(q, k, cosines, sines)), formula, leaves,
                                torch.randn(3, 6, 5, dim, generator=g).to(dtype))
    assert (value.double() - wanted).abs().max() <= 8 * DTYPES[dtype]


def test_numbers_that_are_none_stay_none(fused):
    x = torch.full((1, 33), float("nan"), dtype=torch.bfloat16)
    assert fused.rms_norm(x, torch.ones(33, dtype=torch.bfloat16), 1e-5).isnan().all()
    assert fused.gated(x, x).isnan().all()


def test_a_llama_is_fused_everywhere_and_left_as_it_was():
    from transformers.models.llama import modeling_llama

    model, original = build("llama"), modeling_llama.apply_rotary_pos_emb
    found = find_fusions(model, REFERENCE)
    layers = model.config.num_hidden_layers
    assert found.counts == {"rms_norm": 2 * layers + 1, "gated": layers, "rotary": 1}
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with found.swapped():
            assert modeling_llama.apply_rotary_pos_emb is not original
            inside = model(input_ids=ids).logits
    assert torch.allclose(inside, before, rtol=1e-4, atol=1e-5)
    assert modeling_llama.apply_rotary_pos_emb is original
    assert not any("forward" in vars(m) for m in model.modules())


def test_models_that_end_in_any_order_leave_a_file_its_own_function(fused):
    """Of two models on one server the first may end first; then the second's stayed, for all models to come."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    first, second = (find_fusions(build("llama"), fused).swapped() for _ in range(2))
    first.__enter__()
    second.__enter__()
    with FakeTensorMode():  # a memory plan, in another thread
        query, key, angles = torch.empty(2, 4, 3, 16), torch.empty(2, 2, 3, 16), torch.empty(2, 3, 16)
        assert modeling_llama.apply_rotary_pos_emb(query, key, angles, angles)[0].shape == query.shape
    first.__exit__(None, None, None)
    assert modeling_llama.apply_rotary_pos_emb is not original
    third = find_fusions(build("llama"), fused)  # tried beside the file's own
    second.__exit__(None, None, None)
    assert modeling_llama.apply_rotary_pos_emb is original
    with third.swapped():
        pass
    assert modeling_llama.apply_rotary_pos_emb is original


def test_gradients_flow_through_the_originals_inside():
    model = build("llama")
    with find_fusions(model, REFERENCE).swapped():
        model(input_ids=torch.arange(5, 15)[None]).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class MeanRMSNorm(nn.Module):
    """Named like one of them, and another formula."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class OddMLP(nn.Module):
    """The names of a gated MLP, with the gate on the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def test_what_only_looks_like_a_candidate_is_left_alone():
    model = nn.ModuleList([MeanRMSNorm(), OddMLP(), nn.RMSNorm(8, eps=1e-5)])
    assert find_fusions(model, REFERENCE).counts == {"rms_norm": 1}


def test_without_fused_operations_nothing_is_found():
    found = find_fusions(build("llama"), None)
    assert not found.modules and not found.files


def test_an_mlp_with_a_dropout_of_its_own_is_left_alone():
    class Dropping(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
            self.act_fn, self.p = nn.SiLU(), p

        def forward(self, x):
            x = F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), self.p, self.training)
            return self.down_proj(x)

    for p, count in ((0.0, 1), (0.3, 0)):
        module = Dropping(p).eval()
        assert find_fusions(module, REFERENCE).counts.get("gated", 0) == count
        assert not module.training and not module.gate_proj.training


# -- scores of tokens and optimizer steps by a kernel, against torch's own autograd and optimizer in wide numbers -----


BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request):
    if request.param == "reference":
        return reference.token_scores, Updates(reference.adamw, reference.sum_of_squares)
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    ops = cpu.load()
    return ops.token_scores, ops.updates


def logits_of(size, words, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(size, words, generator=generator) - 60 * torch.rand(size, 1, generator=generator)
    return logits.to(dtype), torch.randint(words, (size,), generator=generator)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("words", [1, 5, 16, 50, 1003])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(0.3, -0.2), (0.3, None), (None, -0.2)])
def test_scores_of_tokens_and_their_gradients_are_those_of_wide_logits(kernels, dtype, words, temperature, weights):
    logits, targets = logits_of(9, words, dtype)
    assert_as_in_wide_numbers(kernels[0], logits, targets, temperature, weights, BOUNDS[dtype])


def test_words_ruled_out_ties_and_numbers_that_are_none(kernels):
    ruled_out = torch.tensor([[0.0, float("-inf"), 0.0, 0.0]], requires_grad=True)  # 1/3 each of three words
    logprobs, entropy, correct = kernels[0](ruled_out, torch.tensor([0]), 1.0, True)
    assert logprobs.item() == pytest.approx(-1.0986123) and entropy.item() == pytest.approx(1.0986123)
    assert correct.tolist() == [True]
    (logprobs.sum() + entropy.sum()).backward()
    assert ruled_out.grad[0].tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    tied = torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]])
    assert kernels[0](tied, torch.tensor([1, 2]), 1.0, False)[2].tolist() == [True, False]
    broken = torch.full((1, 40), 0.0)
    broken[0, 33] = float("nan")
    assert kernels[0](broken, torch.tensor([1]), 1.0, False)[0].isnan().all()
    assert kernels[0](torch.empty(0, 7), torch.empty(0, dtype=torch.long), 1.0, True)[0].shape == (0,)
    turned = torch.randn(5, 3).T  # no row of it is dense
    expected = turned.log_softmax(-1)[:, 2]
    torch.testing.assert_close(kernels[0](turned, torch.tensor([2, 2, 2]), 1.0, False)[0], expected)


def test_a_target_that_is_no_word_is_an_error(kernels):
    for target in (-1, 4):
        with pytest.raises((IndexError, RuntimeError)):
            kernels[0](torch.zeros(1, 4), torch.tensor([target]), 1.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 15, 100, 40_000])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_step_is_torch_s_adamw_on_fp32_weights(kernels, dtype, count, factor):
    generator = torch.Generator().manual_seed(count)
    master = torch.randn(count, generator=generator)
    twin = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([twin], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    weight, average, square = master.bfloat16(), torch.zeros(count), torch.zeros(count)
    for step in (1, 2, 3):
        gradient = torch.randn(count, generator=generator).to(dtype)
        twin.grad = gradient.double() * factor
        optimizer.step()
        kernels[1].adamw(weight, master, gradient, average, square, step=step, lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-6,
                         weight_decay=0.1, factor=factor)
        assert kernels[1].sum_of_squares(gradient) == pytest.approx(gradient.double().square().sum().item(), rel=1e-6)
    state = optimizer.state[twin]
    torch.testing.assert_close(master.double(), twin.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(average.double(), state["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(square.double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-9)
    assert torch.equal(weight, master.bfloat16())
    kernels[1].adamw(None, master, gradient, average, square, step=4, lr=0.0, beta1=0.8, beta2=0.95, eps=1e-6,
                     weight_decay=0.1)
    assert torch.equal(weight, master.bfloat16())  # rate 0: nothing has moved
