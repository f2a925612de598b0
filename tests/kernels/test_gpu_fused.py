"""Norms, gates and rotary positions in Triton against their definitions in fp64, forward and backward: on a card, or on
the processor where Triton is interpreted (tests/kernels/test_kernels_triton.py runs this file so).
"""

from __future__ import annotations

import os

import pytest
import torch

from hybrid_rlhf import kernels
from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.fusions import find_fusions
from hybrid_rlhf.kernels.ops import Fused
from tests.factories.architectures import build
from tests.simulated_card import simulated_card

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="no card"),
              pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")]  # numpy's
# Of the largest number of a tensor; the definitions round twice. The interpreter cuts bf16 where cards round.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0 ** (-6 if IS_INTERPRETED else -7), torch.float16: 2.0**-10}
DEFINITIONS = Fused(reference.rms_norm, reference.gated, reference.rotary)
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def draw(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_as_defined(ours, definition, inputs, num_leaves, dtype):
    """Outputs, and gradients of a random weighting of them by the first inputs, are those of the definition in fp64."""
    def results(function, to):
        given = [x.detach().to(to).requires_grad_(i < num_leaves) for i, x in enumerate(inputs)]
        out = function(*given)
        out = out if isinstance(out, tuple) else (out,)
        weights = [draw(*o.shape, dtype=dtype, seed=9).to(to) for o in out]
        return [*out, *torch.autograd.grad(out, given[:num_leaves], weights)]

    for got, want in zip(results(ours, dtype), results(definition, torch.float64), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got.double() - want).abs().max() <= 2 * BOUNDS[dtype] * want.abs().max()


def norm64(x, weight, adds_one):
    scaled = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * (1 + weight) if adds_one else scaled * weight


@each_dtype
@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 7, 5), (40, 3, 64), (1, 5, 2050)], ids=str)
def test_norms_are_those_of_the_formula(ops, shape, dtype):
    x, weight = draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype, seed=1)
    for adds_one in (False, True):
        assert_as_defined(lambda x, w, one=adds_one: ops.fused.rms_norm(x, w, 1e-5, one),
                          lambda x, w, one=adds_one: norm64(x, w, one), [x, weight], 2, dtype)
    assert_as_defined(lambda x: ops.fused.rms_norm(x.transpose(0, 1), weight, 1e-5),
                      lambda x: norm64(x.transpose(0, 1), weight.double(), False), [x], 1, dtype)


def test_rows_that_are_too_long_are_left_to_the_models_own_code(ops):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norms = torch.nn.ModuleList([LlamaRMSNorm(8192), LlamaRMSNorm(8194)]).to(DEVICE)
    assert [module for module, _ in find_fusions(norms, ops.fused).modules] == [norms[0]]


@each_dtype
@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
def test_gates_are_those_of_the_formula(ops, is_gelu, dtype):
    gate = torch.cat([torch.linspace(-6, 6, 801), torch.zeros(3)]).to(DEVICE, dtype).expand(2, -1)  # more than a block
    up = draw(*gate.shape, dtype=dtype)
    assert_as_defined(lambda g, u: ops.fused.gated(g, u, is_gelu), lambda g, u: reference.gated(g, u, is_gelu),
                      [gate, up], 2, dtype)


@pytest.mark.parametrize("is_gelu", [False, True], ids=["silu", "gelu"])
def test_gates_far_from_zero_are_zero_or_pass_and_their_gradients_are_finite(ops, is_gelu):
    gate = torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4], device=DEVICE, requires_grad=True)
    out = ops.fused.gated(gate, torch.ones_like(gate), is_gelu)
    out.sum().backward()
    assert out.tolist() == [0, 0, 0, 90, 200, 1e4] and gate.grad.tolist() == [0, 0, 0, 1, 1, 1]


@each_dtype
@pytest.mark.parametrize("rows, dim", [(1, 64), (2, 6), (2, 80)])
def test_rotary_positions_are_those_of_the_definition_for_any_angles(ops, rows, dim, dtype):
    query, key = (draw(2, 5, h, dim, dtype=dtype, seed=h).transpose(1, 2) for h in (5, 2))  # as models make them
    cosines, sines = draw(rows, 5, dim, dtype=dtype, seed=7), draw(rows, 5, dim, dtype=dtype, seed=8)
    assert_as_defined(ops.fused.rotary, reference.rotary, [query, key, cosines, sines], 2, dtype)
    out, _ = ops.fused.rotary(query, key, cosines, sines)
    assert out.stride() == query.stride()


def test_numbers_that_are_none_stay_none_and_nothing_is_nothing(ops):
    x = torch.full((1, 33), float("nan"), device=DEVICE)
    assert ops.fused.rms_norm(x, torch.ones(33, device=DEVICE), 1e-5).isnan().all()
    assert ops.fused.gated(x, x).isnan().all() and ops.fused.gated(x, x, True).isnan().all()
    empty = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    ops.fused.gated(ops.fused.rms_norm(empty, torch.ones(8, device=DEVICE), 1e-5), empty).sum().backward()
    assert empty.grad.shape == (0, 8)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_models_are_fused_everywhere_and_give_the_same_logits_and_gradients(ops, kind):
    model = build(kind).to(DEVICE)
    found, want = find_fusions(model, ops.fused), find_fusions(model, DEFINITIONS)
    assert found.counts == want.counts and found.counts["rms_norm"] > 2 and found.counts["gated"]
    ids = torch.arange(5, 15, device=DEVICE)[None]

    def results():
        model.zero_grad()
        logits = model(input_ids=ids).logits
        logits.float().square().mean().backward()
        return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    before = results()
    with found.swapped():
        inside = results()
    assert all((a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-7 for a, b in zip(inside, before, strict=True))


@pytest.mark.skipif(not IS_INTERPRETED, reason="for machines without a card")
def test_on_a_card_a_first_launch_is_made_and_trying_fusions_leaves_its_generator_alone(monkeypatch):
    from hybrid_rlhf.kernels import triton_trial

    with simulated_card(has_triton=True):
        launches, put_seven = [], triton_trial.put_seven
        monkeypatch.setattr(triton_trial, "put_seven", lambda: launches.append(put_seven()) or launches[-1])
        ops, model = kernels.ops_for("cuda"), build("llama").to("cuda")
        assert (ops.name, launches) == ("cuda (Triton)", [7])
        torch.cuda.manual_seed(3)
        before = torch.cuda.get_rng_state()
        assert find_fusions(model, ops.fused).counts.keys() == {"rms_norm", "gated", "rotary"}
        assert torch.equal(torch.cuda.get_rng_state(), before)
