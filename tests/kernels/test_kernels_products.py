"""Our matrix products: right, independent of the batch, and gone when the block ends."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf.kernels import cpu
from hybrid_rlhf.kernels.fusions import own_products


@pytest.fixture(scope="module")
def linear():
    """The C++ product, whether or not this processor's Ops would use it."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return cpu.module().linear


@pytest.mark.parametrize("dtype, step", [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)],
                         ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 33, 48, 64, 65, 130])
def test_products_are_exact_but_for_one_rounding(linear, rows, dtype, step):
    for inner, outer, has_bias in ((1, 1, False), (7, 5, True), (32, 49, False), (768, 96, True), (2500, 101, True),
                                   (530, 131, False), (2496, 107, True)):
        g = torch.Generator().manual_seed(inner)
        x, weight = (torch.randn(n, inner, generator=g).to(dtype) for n in (rows, outer))
        bias = torch.randn(outer, generator=g).to(dtype) if has_bias else None
        want = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        out = linear(x, weight, bias)
        assert out.dtype == dtype and out.shape == (rows, outer)
        sums = (x.double().abs() @ weight.double().abs().T) * 1e-6  # rounding inside an fp32 sum
        assert ((out.double() - want).abs() <= want.abs() * step * 1.01 + sums).all()


@pytest.mark.parametrize("rows", [1, 3, 16, 65, 300])
def test_the_packed_product_is_exact_on_every_processor(linear, rows):
    for inner, outer in ((7, 5), (768, 96), (2500, 101), (530, 131)):
        x, weight, bias = torch.randn(rows, inner), torch.randn(outer, inner), torch.randn(outer)
        want = x.double() @ weight.double().T + bias.double()
        assert (cpu.module().packed_linear(x, weight, bias).double() - want).abs().max() < 1e-6 * inner**0.5 * 20


def test_leading_dimensions_and_strides_are_kept(linear):
    weight = torch.randn(6, 16).bfloat16()
    x = torch.randn(3, 16, 5).bfloat16()
    want = torch.einsum("bio,ni->bon", x.double(), weight.double())
    assert (linear(x.mT, weight).double() - want).abs().max() < 0.05
    wide = torch.randn(6, 40).bfloat16()[:, 3:19]  # rows apart, as a shard's view has them
    assert torch.equal(linear(x.mT, wide), linear(x.mT, wide.contiguous()))
    x, wide = torch.randn(20, 100).bfloat16()[:, 1:97], torch.randn(70, 130).bfloat16()[:, 5:101]  # of whole tiles
    assert torch.equal(linear(x, wide), linear(x.contiguous(), wide.contiguous()))


def test_a_process_that_may_not_use_the_matrix_unit_is_told(caplog):
    assert cpu.has_tiles(SimpleNamespace(compiled_with_tiles=lambda: True, has_tiles=lambda: True)) is True
    assert cpu.has_tiles(SimpleNamespace(compiled_with_tiles=lambda: False, has_tiles=lambda: False)) is False
    assert not caplog.messages
    assert cpu.has_tiles(SimpleNamespace(compiled_with_tiles=lambda: True, has_tiles=lambda: False)) is False
    assert "the system lets this process not use the processor's matrix unit" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(linear, dtype):
    for inner, outer in ((700, 61), (704, 96)):  # the second is of whole tiles, where there is a matrix unit
        x, weight = torch.randn(37, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        whole = linear(x, weight)
        assert all(torch.equal(linear(x[i:i + n], weight), whole[i:i + n]) for i in range(0, 37, 3) for n in (1, 2, 3))


def test_products_of_torch_and_ours_in_turns_leave_each_other_alone(linear):
    """Both may lay out the same matrix unit, each in its own way."""
    x, weight, other = (torch.randn(n, 96).bfloat16() for n in (20, 64, 40))
    ours, theirs = linear(x, weight), torch.nn.functional.linear(x, other)
    for _ in range(3):
        assert torch.equal(linear(x, weight), ours) and torch.equal(torch.nn.functional.linear(x, other), theirs)
    assert (theirs.double() - x.double() @ other.double().T).abs().max() < 0.25


def test_shapes_that_do_not_fit_are_an_error(linear):
    with pytest.raises(ValueError, match="do not fit"):
        linear(torch.zeros(2, 5), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="bias has 2"):
        linear(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(2))


BITS16 = frozenset({torch.bfloat16, torch.float16})


class Odd(nn.Linear):
    """A subclass, as quantized layers are."""


def test_plain_16_bit_layers_multiply_by_ours_inside_the_block_only(linear):
    calls = []

    def counted(*inputs):
        calls.append(inputs[1])
        return linear(*inputs)

    model = nn.ModuleDict(dict(a=nn.Linear(8, 8).bfloat16(), odd=Odd(8, 8).bfloat16(), wide=nn.Linear(8, 8)))
    hooked = nn.Linear(8, 8).bfloat16()
    hooked.forward = replaced = hooked.forward
    model["hooked"] = hooked
    x = torch.randn(4, 8).bfloat16()
    with torch.no_grad():
        before = model["a"](x)
        with own_products(model, counted, BITS16) as count:
            inside = model["a"](x)
            model["odd"](x), hooked(x), model["wide"](x.float())
            assert model["a"](x.float()[:0].bfloat16()).shape == (0, 8)
        after = model["a"](x)
    assert count == 1 and len(calls) == 1 and calls[0] is model["a"].weight
    assert (inside - before).abs().max() < 0.05 and torch.equal(before, after)
    assert "forward" not in vars(model["a"]) and hooked.forward == replaced


def test_gradients_still_flow_inside_the_block_and_an_exception_undoes_it(linear):
    layer = nn.Linear(8, 8).bfloat16()
    with own_products(layer, linear, BITS16):
        layer(torch.randn(2, 8).bfloat16()).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(RuntimeError), own_products(layer, linear, BITS16):
        layer(torch.zeros(2, 9).bfloat16())
    assert "forward" not in vars(layer)


def test_without_own_products_nothing_is_touched():
    layer = nn.Linear(8, 8).bfloat16()
    with own_products(layer, None, BITS16) as count:
        assert count == 0 and "forward" not in vars(layer)


def test_products_are_ours_only_where_torch_is_slower(monkeypatch):
    wide = {torch.float32}
    for machine, capability, has_dots, ours in (
            ("x86_64", "AVX2", False, BITS16), ("x86_64", "DEFAULT", False, BITS16), ("x86_64", "AVX512", False, wide),
            ("x86_64", "AVX512", True, {torch.bfloat16, torch.float32}), ("aarch64", "DEFAULT", False, set())):
        monkeypatch.setattr(cpu.platform, "machine", lambda value=machine: value)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda value=capability: value)
        assert cpu.own_dtypes(has_dots) == ours
