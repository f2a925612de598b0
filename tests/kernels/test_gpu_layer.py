"""A decoder layer of a decode step in Triton against plain torch in double precision: on a card, or on the processor
where Triton is interpreted (tests/kernels/test_kernels_triton.py runs this file so).
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional as F

from tests.factories.plain_layers import numbers_of, plain, plain_opt

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="no card"),
              pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")]  # numpy's
# Of the largest number; the interpreter multiplies no bf16.
BOUNDS = {torch.float16: 0.004} | ({} if IS_INTERPRETED else {torch.bfloat16: 0.03})
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
ROWS, COLUMNS, DIM = 5, 9, 32
SLOTS, POSITIONS = [5, 0, 2, 1, 4], [0, 8, 3, -1, 5]  # the fourth row is idle



def draws(dtype, seed):
    numbers = numbers_of(dtype, seed)
    return lambda *shape, scale=1.0: numbers(*shape, scale=scale).to(DEVICE)


@each_dtype
@pytest.mark.parametrize("rows", [1, 8, 20, 64])
@pytest.mark.parametrize("size_in, sizes", [(40, [24]), (2048, [48, 16, 16]), (1100, [70]), (4864, [32])], ids=str)
def test_products_side_by_side_are_those_of_torch(ops, dtype, rows, size_in, sizes):
    """With biases and what is added; inputs of more than one split among them; twice, as counters must be left."""
    from hybrid_rlhf.kernels import triton_layer

    numbers = draws(dtype, rows)
    x, added = numbers(rows, size_in), numbers(rows, sum(sizes))
    weights, biases = [numbers(n, size_in, scale=size_in**-0.5) for n in sizes], [numbers(n) for n in sizes]
    want = added.double() + torch.cat([F.linear(x.double(), w.double(), b.double())
                                       for w, b in zip(weights, biases, strict=True)], 1)
    for _ in range(2):
        got = triton_layer.product(x, [*map(triton_layer.Matrix, weights, biases)], residual=added)
        assert got.dtype == dtype and (got - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "relu", ""])
def test_activations_and_gates_are_those_of_torch(ops, dtype, activation):
    from hybrid_rlhf.kernels import triton_layer

    numbers = draws(dtype, 1)
    x, weights = numbers(3, 96), [numbers(136, 96, scale=96**-0.5) for _ in range(2)]
    act = {"silu": F.silu, "gelu": lambda t: F.gelu(t, approximate="tanh"), "relu": F.relu, "": lambda t: t}[activation]
    first, second = (F.linear(x.double(), w.double()) for w in weights)
    for is_gated, want in ((True, act(first) * second), (False, act(torch.cat([first, second], 1)))):
        got = triton_layer.product(x, [*map(triton_layer.Matrix, weights)], activation=activation, is_gated=is_gated)
        assert (got - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


def check_layer(layer, x, angles, keys, values, wanted, dtype):
    """Output, new columns, and nothing else written. wanted(row, columns before it): output, key, value."""
    before = keys.clone(), values.clone()
    slots, positions = (torch.tensor(n, device=DEVICE) for n in (SLOTS, POSITIONS))
    out = layer(x, *angles, keys, values, slots[:, None], positions, COLUMNS)
    assert out.shape == x.shape and out.dtype == dtype
    for row, (slot, position) in enumerate(zip(SLOTS, POSITIONS, strict=True)):
        if position < 0:
            continue
        want, key, value = wanted(row, [c[slot, :, :position].transpose(0, 1).double() for c in before])
        for ours, theirs in ((out[row, 0], want), (keys[slot, :, position], key), (values[slot, :, position], value)):
            assert (ours.double() - theirs).abs().max() <= BOUNDS[dtype] * theirs.abs().max()
        before[0][slot, :, position], before[1][slot, :, position] = keys[slot, :, position], values[slot, :, position]
    assert torch.equal(before[0], keys) and torch.equal(before[1], values)


@each_dtype
@pytest.mark.parametrize("heads, kv_heads, has_extras", [(4, 2, False), (3, 3, True), (4, 1, True)])
@pytest.mark.parametrize("hidden, inner", [(40, 72), (96, 224)])
def test_a_layer_of_llamas_form_is_that_of_plain_torch(ops, dtype, heads, kv_heads, has_extras, hidden, inner):
    """has_extras: biases, norms of the heads, norms that add one, GELU."""
    numbers = draws(dtype, heads + kv_heads)
    sizes = [(heads * DIM, hidden), (kv_heads * DIM, hidden), (kv_heads * DIM, hidden), (hidden, heads * DIM),
             (inner, hidden), (inner, hidden), (hidden, inner)]
    weights = [numbers(*size, scale=size[1] ** -0.5) for size in sizes]
    biases = [numbers(size[0]) if has_extras and i < 3 else None for i, size in enumerate(sizes)]
    norms = [numbers(hidden), numbers(hidden), *((numbers(DIM), numbers(DIM)) if has_extras else (None, None))]
    layer = ops.decode_layer(weights, biases, norms, [None] * 4, [None] * 7, eps=1e-6, adds_one=has_extras, scaling=0.2,
                             activation="gelu" if has_extras else "silu")
    doubles = [[t if t is None else t.double() for t in ts] for ts in (weights, biases, norms)]
    x, angles = numbers(ROWS, 1, hidden), (numbers(ROWS, 1, DIM), numbers(ROWS, 1, DIM))
    keys, values = (numbers(ROWS + 1, kv_heads, COLUMNS, DIM) for _ in range(2))

    def wanted(row, columns):
        turned = [a[row, 0].double() for a in angles]
        return plain(x[row, 0].double(), *doubles, turned, columns, 0.2, has_extras, has_extras)

    check_layer(layer, x, angles, keys, values, wanted, dtype)


@each_dtype
def test_adapters_are_added_where_the_sums_are(ops, dtype):
    """Of unlike ranks, one matrix without; as large as the weights; and before a gate."""
    from hybrid_rlhf.kernels import triton_layer

    numbers, size_in, rows = draws(dtype, 4), 1100, 20
    for sizes, ranks, is_gated in (([48, 16, 40], [8, None, 20], False), ([70], [3], False), ([40, 40], [4, 16], True)):
        x, weights = numbers(rows, size_in), [numbers(n, size_in, scale=size_in**-0.5) for n in sizes]
        adapters = [r and (numbers(r, size_in, scale=size_in**-0.5), numbers(n, r, scale=r**-0.5), 0.5)
                    for n, r in zip(sizes, ranks, strict=True)]
        parts = [F.linear(x.double(), w.double() + (0 if a is None else a[2] * a[1].double() @ a[0].double()))
                 for w, a in zip(weights, adapters, strict=True)]
        want = F.silu(parts[0]) * parts[1] if is_gated else torch.cat(parts, 1)
        got = triton_layer.product(x, [*map(triton_layer.Matrix, weights, [None] * 3, adapters)], is_gated=is_gated,
                                   activation="silu" if is_gated else "")
        assert (got - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


def packed(numbers, bits, size_out, size_in):
    """A random matrix in 4 bits (any table of numbers) or 8, and its numbers, multiplied by hand."""
    from hybrid_rlhf.core.tensors import PackedMatrix

    shape = torch.Size((size_out, size_in))
    places = (numbers(*shape).float().abs() * 1000).long() % (16 if bits == 4 else 255)
    if bits == 8:
        scales = numbers(size_out).float().abs() * size_in**-0.5 / 127
        return PackedMatrix((places - 127).to(torch.int8), scales, None, shape), (places - 127) * scales[:, None]
    table = torch.linspace(-1, 1.1, 16, device=DEVICE) ** 3
    scales = numbers(size_out, size_in // 64).float().abs() * size_in**-0.5
    values = (places[:, ::2] * 16 + places[:, 1::2]).to(torch.uint8).flatten()
    return PackedMatrix(values, scales.flatten(), table, shape), table[places] * scales.repeat_interleave(64, 1)


@each_dtype
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows, size_in, sizes, is_gated", [
    (1, 64, [40], False), (20, 192, [48, 16, 40], False), (5, 4928, [32], False), (64, 320, [40, 40], True)], ids=str)
def test_packed_weights_are_read_as_they_are(ops, dtype, bits, rows, size_in, sizes, is_gated):
    """With biases and adapters; of several splits; and against a weight that is rounded to the dtype before."""
    from hybrid_rlhf.kernels import reference, triton_layer

    numbers = draws(dtype, bits + rows)
    x, biases = numbers(rows, size_in), [numbers(n, scale=0.1) for n in sizes]
    matrices, weights = zip(*(packed(numbers, bits, n, size_in) for n in sizes), strict=True)
    for matrix, weight in zip(matrices, weights, strict=True):
        assert torch.equal(reference.unpacked(matrix, dtype), weight.to(dtype))
    adapters = [(numbers(8, size_in, scale=size_in**-0.5), numbers(n, 8, scale=8**-0.5), 0.5) for n in sizes]
    parts = [F.linear(x.double(), w.to(dtype).double() + a[2] * a[1].double() @ a[0].double(), b.double())
             for w, b, a in zip(weights, biases, adapters, strict=True)]
    want = F.silu(parts[0]) * parts[1] if is_gated else torch.cat(parts, 1)
    got = triton_layer.product(x, [*map(triton_layer.Matrix, matrices, biases, adapters)], is_gated=is_gated,
                               activation="silu" if is_gated else "")
    assert (got - want).abs().max() <= BOUNDS[dtype] * want.abs().max()


@each_dtype
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_layer_of_opts_form_is_that_of_plain_torch(ops, dtype, has_adapters):
    numbers, heads, hidden, inner = draws(dtype, 1), 2, 96, 224
    sizes = [(heads * DIM, hidden)] * 3 + [(hidden, heads * DIM), None, (inner, hidden), (hidden, inner)]
    weights = [size and numbers(*size, scale=size[1] ** -0.5) for size in sizes]
    biases = [size and numbers(size[0]) for size in sizes]
    norms, norm_biases = ([numbers(hidden), numbers(hidden), None, None] for _ in range(2))
    ranks = [3, 4, 7, 8, None, 16, 5] if has_adapters else [None] * 7
    adapters = [r and (numbers(r, size[1], scale=size[1] ** -0.5), numbers(size[0], r), 0.5)
                for r, size in zip(ranks, sizes, strict=True)]
    layer = ops.decode_layer(weights, biases, norms, norm_biases, adapters, eps=1e-5, adds_one=False, scaling=0.2,
                             activation="relu")
    wide = [a and (a[0].double(), a[1].double(), a[2]) for a in adapters]
    doubles = [[t if t is None else t.double() for t in ts] for ts in (weights, biases, norms, norm_biases)]
    x = numbers(ROWS, 1, hidden) + 1  # a mean that LayerNorm takes away
    keys, values = (numbers(ROWS + 1, heads, COLUMNS, DIM) for _ in range(2))
    check_layer(layer, x, (None, None), keys, values, lambda row, columns: plain_opt(
        x[row, 0].double(), *doubles, wide, columns, 0.2), dtype)
