"""Fused operations: right by their definition, found by trial, and gone when the mode ends."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hybrid_rlhf.kernels import cpu, reference
from hybrid_rlhf.kernels.fusions import find_fusions
from hybrid_rlhf.kernels.ops import Fused
from tests.factories.architectures import build

DTYPES = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
REFERENCE = Fused(reference.rms_norm, reference.gated, reference.rotary)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def fused(request):
    if request.param == "reference":
        return REFERENCE
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return cpu.load().fused


def near(ours, want, dtype):
    assert ours.dtype == dtype and ours.shape == want.shape
    return bool(((ours.double() - want).abs() <= 2.5 * DTYPES[dtype] * want.abs() + 1e-6).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 5, 16, 40, 192, 2050])
def test_norms_are_those_of_the_formula(fused, dtype, dim):
    g = torch.Generator().manual_seed(dim)
    x, weight = torch.randn(3, 7, dim, generator=g).to(dtype), torch.randn(dim, generator=g).to(dtype)
    scaled = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert near(fused.rms_norm(x, weight, 1e-5), scaled * weight.double(), dtype)
    assert near(fused.rms_norm(x, weight, 1e-5, True), scaled * (1 + weight.double()), dtype)
    assert near(fused.rms_norm(x.transpose(0, 1), weight, 1e-5), scaled.transpose(0, 1) * weight.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_are_those_of_the_formula(fused, dtype):
    gate = torch.cat([torch.linspace(-120, 120, 801), torch.zeros(3)]).to(dtype).expand(21, -1)  # more than one piece
    up = torch.randn(gate.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = gate.double()
    assert near(fused.gated(gate, up), wide * wide.sigmoid() * up.double(), dtype)
    assert near(fused.gated(gate, up, True), F.gelu(wide, approximate="tanh") * up.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 8, 20, 64])
def test_rotary_positions_turn_each_pair_by_its_angle(fused, dtype, dim):
    g = torch.Generator().manual_seed(dim)
    query, key = (torch.randn(3, 5, h, dim, generator=g).to(dtype).transpose(1, 2) for h in (4, 2))
    angles = torch.randn(1, 5, dim // 2, generator=g).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    for x, out in zip((query, key), fused.rotary(query, key, cosines, sines), strict=True):
        turn = torch.complex(cosines.double(), sines.double())[:, None, :, : dim // 2]
        turned = torch.complex(*x.double().chunk(2, -1)) * turn
        want = torch.cat([turned.real, turned.imag], -1)
        assert out.dtype == dtype and (out.double() - want).abs().max() <= 8 * DTYPES[dtype]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [5, 16, 192, 2050])
@pytest.mark.parametrize("adds_one", [False, True])
def test_gradients_of_norms_are_those_of_the_formula(fused, dtype, dim, adds_one):
    g = torch.Generator().manual_seed(dim)
    leaves = [torch.randn(3, 70, dim, generator=g).to(dtype), torch.randn(dim, generator=g).to(dtype)]
    by_out = torch.randn(3, 70, dim, generator=g).to(dtype)

    def formula(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + adds_one)

    assert_same_gradients(lambda x, w: fused.rms_norm(x, w, 1e-5, adds_one), formula, leaves, by_out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gradients_of_gates_are_those_of_the_formula(fused, dtype, is_gelu):
    g = torch.Generator().manual_seed(1)
    leaves = [torch.linspace(-12, 12, 801).to(dtype).expand(21, -1), torch.randn(21, 801, generator=g).to(dtype)]

    def formula(gate, up):
        return (F.gelu(gate, approximate="tanh") if is_gelu else gate * gate.sigmoid()) * up

    assert_same_gradients(lambda gate, up: fused.gated(gate, up, is_gelu), formula, leaves,
                          torch.randn(21, 801, generator=g).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 20, 64])
def test_gradients_of_rotary_positions_turn_back(fused, dtype, dim):
    g = torch.Generator().manual_seed(dim)
    leaves = [torch.randn(3, 5, h, dim, generator=g).to(dtype).transpose(1, 2) for h in (4, 2)]
    angles = torch.randn(1, 5, dim // 2, generator=g).repeat(1, 1, 2)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)

    def joined(pair):
        return torch.cat(pair, 1)

    def formula(query, key):
        def turned(x):
            a, b = x.chunk(2, -1)
            return x * cosines.double()[:, None] + torch.cat([-b, a], -1) * sines.double()[:, None]
        return joined((turned(query), turned(key)))

    assert_same_gradients(lambda q, k: joined(fused.rotary(q, k, cosines, sines)), formula, leaves,
                          torch.randn(3, 6, 5, dim, generator=g).to(dtype))


def assert_same_gradients(ours, formula, leaves, by_out):
    def gradients(function, dtype=None):
        own = [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in leaves]
        return torch.autograd.grad(function(*own), own, by_out.to(dtype or by_out.dtype))

    for found, wanted in zip(gradients(ours), gradients(formula, torch.float64), strict=True):
        assert found.dtype == by_out.dtype and found.shape == wanted.shape
        assert (found.double() - wanted).norm() <= 3 * DTYPES[by_out.dtype] * wanted.norm()


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
