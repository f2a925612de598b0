"""A decoder layer of a decode step in Triton, in seven to nine launches; with LoRA four more, of the products by A.
kernels/reference.py: DecodeLayer is its definition; numbers are rounded where it rounds them.

A step of few rows takes the time of reading the weights, and of its launches. So weights are read once and in place, by
blocks of few outputs that keep every processor reading; products of one input (query, key and value) are one launch,
and what follows a product (bias, activation and gate, what is added to it) is done where its sums are. From Hopper on
a kernel is launched before the last one has ended (programmatic dependent launch) and asks for its first weights.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hybrid_rlhf.core.tensors import PackedMatrix
from hybrid_rlhf.kernels.triton_attention import Card, card_of, decode_attention
from hybrid_rlhf.kernels.triton_fused import _activated

_MOST_ROWS = 64
_MOST_TILES = 4096  # of a product whose inputs are split
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2, "relu": 3}


# -- products ----------------------------------------------------------------------------------------------------------


@triton.jit
def _begin(OVERLAPS: tl.constexpr):
    """Lets the next kernel be launched, and waits for all before this one: nothing of theirs is read or written yet."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _ask_for(weight, columns, size, begin, end, size_in, BITS: tl.constexpr):
    """Begins to read the first KiB of some outputs' weights into the card's L2 cache, by lines of 128 bytes."""
    line: tl.constexpr = 64 if BITS == 16 else 128
    in_one: tl.constexpr = 2 if BITS == 4 else 1  # numbers
    ahead = tl.minimum(begin // in_one + line * tl.arange(0, 8), end // in_one - 1)
    places = weight + tl.minimum(columns, size - 1)[:, None] * (size_in // in_one) + ahead[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32,
                              is_pure=False, pack=1)


@triton.jit
def _weights(weight, scales, table, columns, size, start, last, size_in, kind: tl.constexpr, BITS: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """(BLOCK_N, BLOCK_K): some outputs' weights for the inputs from `start` on, rounded to `kind`; those in 8 bits
    without their scales, which are those of whole rows."""
    if BITS == 4:
        blocks, bytes_of = start // 64 + tl.arange(0, BLOCK_K // 64), tl.arange(0, 32)
        inside = (columns < size)[:, None] & (blocks < last // 64)[None, :]
        places = columns[:, None] * (size_in // 64) + blocks[None, :]
        scale = tl.load(scales + places, mask=inside, other=0.0)[:, :, None]
        pairs = tl.load(weight + places[:, :, None] * 32 + bytes_of[None, None, :], mask=inside[:, :, None], other=0)
        first = tl.load(table + (pairs >> 4)) * scale
        second = tl.load(table + (pairs & 15)) * scale
        tile = tl.reshape(tl.join(first.to(kind), second.to(kind)), (BLOCK_N, BLOCK_K))
    else:
        inputs = start + tl.arange(0, BLOCK_K)
        mask = (columns < size)[:, None] & (inputs < last)[None, :]
        tile = tl.load(weight + columns[:, None] * size_in + inputs[None, :], mask=mask, other=0).to(kind)
    return tile


@triton.jit
def _sums(x, weight, scales, other, other_scales, table, columns, size, first, last, num_rows, size_in,
          IS_PAIR: tl.constexpr, BITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_K: tl.constexpr):
    """(BLOCK_M, BLOCK_N) fp32: x W^T over the inputs [first, last) for some outputs of one matrix; and of another."""
    rows = tl.arange(0, BLOCK_M)
    sums, others = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first, last, BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        mask = (rows < num_rows)[:, None] & (inputs < last)[None, :]
        x_tile = tl.load(x + rows[:, None] * size_in + inputs[None, :], mask=mask, other=0.0)
        kind: tl.constexpr = x.dtype.element_ty
        tile = _weights(weight, scales, table, columns, size, start, last, size_in, kind, BITS, BLOCK_N, BLOCK_K)
        sums = tl.dot(x_tile, tl.trans(tile), sums)
        if IS_PAIR:
            tile = _weights(other, other_scales, table, columns, size, start, last, size_in, kind, BITS, BLOCK_N,
                            BLOCK_K)
            others = tl.dot(x_tile, tl.trans(tile), others)
    return sums, others


@triton.jit
def _joined(sums, partials, counters, tile, split, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
            NUM_SPLITS: tl.constexpr):
    """All splits' sums in the program of a tile that ends last, in their order; whether this is it."""
    places = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    base = partials + tile * (NUM_SPLITS * BLOCK_M * BLOCK_N)
    tl.store(base + split * (BLOCK_M * BLOCK_N) + places, sums)
    tl.debug_barrier()  # every thread's part is stored before the count says so
    is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
    if is_last:
        tl.debug_barrier()
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for other in range(NUM_SPLITS):
            sums += tl.load(base + other * (BLOCK_M * BLOCK_N) + places, cache_modifier=".cg")
        tl.atomic_xchg(counters + tile, 0)  # for the next product
    return sums, is_last


@triton.jit
def _rounded(sums, scales, bias, low, up, rank, scaling, columns, size, num_rows, low_size, kind: tl.constexpr,
             BITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOW: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_R: tl.constexpr):
    """The product with its bias and adapter in its dtype, as fp32."""
    inside = columns < size
    if BITS == 8:
        sums *= tl.load(scales + columns, mask=inside, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = sums.to(kind).to(tl.float32)
    if HAS_LOW:
        rows, ranks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        is_rank = (ranks < rank)[None, :]
        low_tile = tl.load(low + rows[:, None] * low_size + ranks[None, :], mask=(rows < num_rows)[:, None] & is_rank,
                        other=0.0)
        part = tl.load(up + columns[:, None] * rank + ranks[None, :], mask=inside[:, None] & is_rank, other=0.0)
        result = (result + scaling * tl.dot(low_tile, tl.trans(part))).to(kind).to(tl.float32)
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _product(x, low, table, first, second, third, first_scales, second_scales, third_scales, first_bias, second_bias,
             third_bias, first_up, second_up, third_up, residual, out, partials, counters, num_rows, size_in, low_size,
             first_size, second_size, third_size, first_rank, second_rank, third_rank, first_scaling, second_scaling,
             third_scaling, size_out, part_size,
             BITS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LOW: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
             IS_GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, NUM_SPLITS: tl.constexpr, OVERLAPS: tl.constexpr):
    """Grid (tiles of BLOCK_N outputs, splits of part_size inputs). out (rows, size_out): x times up to three matrices
    side by side; or, IS_GATED, act(x first^T) * (x second^T). low (rows, low_size): x times the adapters' A."""
    tile, split = tl.program_id(0), tl.program_id(1)
    weight, scales, bias, size, before, at = first, first_scales, first_bias, first_size, 0, tile
    up, rank, scaling, low_at = first_up, first_rank, first_scaling, 0
    if not IS_GATED:
        first_tiles, second_tiles = tl.cdiv(first_size, BLOCK_N), tl.cdiv(second_size, BLOCK_N)
        if tile >= first_tiles + second_tiles:
            weight, scales, bias, size = third, third_scales, third_bias, third_size
            before, at = first_size + second_size, tile - first_tiles - second_tiles
            up, rank, scaling, low_at = third_up, third_rank, third_scaling, first_rank + second_rank
        elif tile >= first_tiles:
            weight, scales, bias, size = second, second_scales, second_bias, second_size
            before, at = first_size, tile - first_tiles
            up, rank, scaling, low_at = second_up, second_rank, second_scaling, first_rank
    rows, columns = tl.arange(0, BLOCK_M), at * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = split * part_size
    end = tl.minimum(begin + part_size, size_in)
    if OVERLAPS:
        _ask_for(weight, columns, size, begin, end, size_in, BITS)
        if IS_GATED:
            _ask_for(second, columns, size, begin, end, size_in, BITS)
    _begin(OVERLAPS)
    sums, factor = _sums(x, weight, scales, second, second_scales, table, columns, size, begin, end, num_rows, size_in,
                         IS_GATED, BITS, BLOCK_M, BLOCK_N, BLOCK_K)
    is_last = True
    if NUM_SPLITS > 1:
        sums, is_last = _joined(sums, partials, counters, tile, split, BLOCK_M, BLOCK_N, NUM_SPLITS)
    if is_last:
        kind: tl.constexpr = out.dtype.element_ty
        result = _rounded(sums, scales, bias, low + low_at, up, rank, scaling, columns, size, num_rows, low_size, kind,
                          BITS, HAS_BIAS, HAS_LOW, BLOCK_M, BLOCK_R)
        if ACTIVATION == 3:
            result = tl.maximum(result, 0.0)
        elif ACTIVATION:
            result, _ = _activated(result, ACTIVATION == 2)
            result = result.to(kind).to(tl.float32)
        if IS_GATED:
            result *= _rounded(factor, second_scales, second_bias, low + first_rank, second_up, second_rank,
                               second_scaling, columns, size, num_rows, low_size, kind, BITS, HAS_BIAS, HAS_LOW,
                               BLOCK_M, BLOCK_R)
        places = rows[:, None] * size_out + (before + columns)[None, :]
        mask = (rows < num_rows)[:, None] & (columns < size)[None, :]
        if HAS_RESIDUAL:
            result = tl.load(residual + places, mask=mask, other=0.0).to(tl.float32) + result.to(kind).to(tl.float32)
        tl.store(out + places, result.to(kind), mask=mask)


class ProductForm(NamedTuple):
    """How a product is compiled: the sizes of its tiles, warps and stages; splits of the inputs."""

    sizes: dict[str, int]
    launch: dict[str, int]
    splits: int


def product_form(rows: int, size_in: int, size_out: int, card: Card, is_gated: bool, bits: int = 16) -> ProductForm:
    """Tiles of few outputs, so that each processor has a program; of long inputs two or more, each with a part of them.

    Measured on an H100 over 14 shapes, 8 and 64 rows, 13 forms each (docs/results/gpu.md): within 8% of the fastest
    form in 25 of the 28, at most 18% off it. The parts do not depend on the rows, so neither do the sums. Those of
    packed weights are not measured: no larger than what fits the registers of every card.
    """
    block_m, block_k = 16 if rows <= 16 else _MOST_ROWS, 128  # few forms, for each is compiled in a second or two
    block_n = 64 if is_gated and bits == 16 and size_out >= 32 * card.processors else 32
    tiles, splits = triton.cdiv(size_out, block_n), 1
    while not is_gated and size_in > 4096 and tiles * splits <= card.processors and size_in >= 2048 * splits:
        splits *= 2
    stages = min(4, (card.shared_memory - 4096) // (2 * block_k * (block_m + (1 + is_gated) * block_n)))
    return ProductForm(dict(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k),
                       dict(num_warps=4, num_stages=max(2, stages)), splits)


@cache
def _overlap(device: torch.device) -> dict[str, bool]:
    """How kernels are launched that may begin before the one before them has ended: from Hopper on."""
    overlaps = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9 and torch.version.hip is None
    return dict(OVERLAPS=True, launch_pdl=True) if overlaps else dict(OVERLAPS=False)


@cache
def _counters(device: torch.device) -> Tensor:
    """Zeros, which every product leaves as it found them; recorded steps know their address."""
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


class Matrix(NamedTuple):
    """W (out, in), its bias, and its adapter: A (r, in), B (out, r) and the factor of B A."""

    weight: Tensor | PackedMatrix
    bias: Tensor | None = None
    adapter: tuple[Tensor, Tensor, float] | None = None


def product(x: Tensor, matrices: list[Matrix], residual: Tensor | None = None, activation: str = "",
            is_gated: bool = False, form: ProductForm | None = None) -> Tensor:
    """x (B, in), B at most 64, times up to three matrices side by side, all with a bias or none.

    Then act(it), or with is_gated act(x first^T) * (x second^T); added to `residual`. All in one 16-bit dtype, dense;
    or all matrices packed alike.
    """
    (rows, size_in), sizes = x.shape, [m.weight.shape[0] for m in matrices]
    spare = 3 - len(matrices)
    weights, bits = [m.weight for m in (*matrices, *matrices[:1] * spare)], _bits(matrices[0].weight)
    size_out = sizes[0] if is_gated else sum(sizes)
    form = form or product_form(rows, size_in, size_out, card_of(x.device), is_gated, bits)
    block_m, block_n, block_k = form.sizes.values()
    tiles = triton.cdiv(size_out, block_n) if is_gated else sum(triton.cdiv(n, block_n) for n in sizes)
    per_split = triton.cdiv(triton.cdiv(size_in, form.splits), block_k) * block_k
    out = x.new_empty(rows, size_out)
    partials = out if form.splits == 1 else x.new_empty(tiles * form.splits * block_m * block_n, dtype=torch.float32)
    downs = [Matrix(m.adapter[0]) for m in matrices if m.adapter]
    low = product(x, downs) if downs else out
    ranks = [m.adapter[1].shape[1] if m.adapter else 0 for m in matrices]
    _product[tiles, form.splits](
        x, low, weights[0].table if bits == 4 else out, *map(_numbers, weights),
        *[w.scales if isinstance(w, PackedMatrix) else out for w in weights],
        *[out if m.bias is None else m.bias for m in matrices], *[out] * spare,
        *[m.adapter[1] if m.adapter else out for m in matrices], *[out] * spare,
        out if residual is None else residual, out, partials, _counters(x.device), rows, size_in, low.shape[1],
        *sizes, *[0] * spare, *ranks, *[0] * spare, *[m.adapter[2] if m.adapter else 0.0 for m in matrices],
        *[0.0] * spare, size_out, per_split, BITS=bits, HAS_BIAS=matrices[0].bias is not None, HAS_LOW=bool(downs),
        HAS_RESIDUAL=residual is not None, IS_GATED=is_gated, ACTIVATION=_ACTIVATIONS[activation],
        BLOCK_R=max(16, triton.next_power_of_2(max(ranks))) if downs else 16, NUM_SPLITS=form.splits, **form.sizes,
        **form.launch, **_overlap(x.device))
    return out


def _numbers(weight: Tensor | PackedMatrix) -> Tensor:
    return weight.values if isinstance(weight, PackedMatrix) else weight


def _bits(weight: Tensor | PackedMatrix) -> int:
    return 16 if not isinstance(weight, PackedMatrix) else 8 if weight.table is None else 4


# -- the rest of a layer -----------------------------------------------------------------------------------------------


@triton.jit
def _norm_row(x, weight, bias, out, size, eps, HAS_BIAS: tl.constexpr, ADDS_ONE: tl.constexpr, BLOCK: tl.constexpr,
              OVERLAPS: tl.constexpr):
    """Grid (rows,): RMSNorm of a row; HAS_BIAS: LayerNorm (1607.06450)."""
    dims = tl.arange(0, BLOCK)
    inside, places = dims < size, tl.program_id(0) * size + dims
    w = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
    _begin(OVERLAPS)
    wide = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        wide = tl.where(inside, wide - tl.sum(wide, 0) / size, 0.0)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    if HAS_BIAS:
        result = scaled * w + tl.load(bias + dims, mask=inside, other=0.0).to(tl.float32)
    elif ADDS_ONE:
        result = scaled * (1.0 + w)
    else:
        result = scaled.to(out.dtype.element_ty).to(tl.float32) * w
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _half(x, weight, dims, inside, factor, kind: tl.constexpr, HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr):
    """Half of a head after its norm, as fp32."""
    if HAS_NORM:
        w = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
        if ADDS_ONE:
            x = (x * factor * (1.0 + w)).to(kind).to(tl.float32)
        else:
            x = ((x * factor).to(kind).to(tl.float32) * w).to(kind).to(tl.float32)
    return x


@triton.jit
def _place_heads(x, query_weight, key_weight, cosines, sines, num_queries, row_size, half, angle_b, eps,
                 HAS_NORM: tl.constexpr, ADDS_ONE: tl.constexpr, HAS_ANGLES: tl.constexpr, BLOCK: tl.constexpr,
                 OVERLAPS: tl.constexpr):
    """Grid (rows, query and key heads): norm and rotation of one head, in place. Halves are paired."""
    row, head, dims = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    kind: tl.constexpr = x.dtype.element_ty
    inside, base = dims < half, x + row * row_size + head * 2 * half + dims
    _begin(OVERLAPS)
    a = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + half, mask=inside, other=0.0).to(tl.float32)
    weight = query_weight
    if head >= num_queries:
        weight = key_weight
    factor = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * half) + eps)
    a = _half(a, weight, dims, inside, factor, kind, HAS_NORM, ADDS_ONE)
    b = _half(b, weight, dims + half, inside, factor, kind, HAS_NORM, ADDS_ONE)
    if HAS_ANGLES:
        angles = row * angle_b + dims
        cos_a = tl.load(cosines + angles, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(cosines + angles + half, mask=inside, other=0.0).to(tl.float32)
        sin_a = tl.load(sines + angles, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(sines + angles + half, mask=inside, other=0.0).to(tl.float32)
        a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    tl.store(base, a.to(kind), mask=inside)
    tl.store(base + half, b.to(kind), mask=inside)


class DecodeLayer:
    """kernels/reference.py: DecodeLayer, of weights in bf16 or fp16, dense, or packed. Raises ValueError for others."""

    max_rows = _MOST_ROWS

    @staticmethod
    def takes_packed(device: torch.device) -> bool:
        return card_of(device).has_matrix_units

    def __init__(self, weights: list[Tensor | PackedMatrix | None], biases: list[Tensor | None],
                 norms: list[Tensor | None], norm_biases: list[Tensor | None],
                 adapters: list[tuple[Tensor, Tensor, float] | None], *, eps: float, adds_one: bool, scaling: float,
                 activation: str) -> None:
        matrices = [w if w is None else Matrix(w, b, a) for w, b, a in zip(weights, biases, adapters, strict=True)]
        if not self.takes_packed(norms[0].device):
            raise ValueError("a card without matrix units that Triton uses")
        if not all(t.is_contiguous() for m in matrices if m for t in (_numbers(m.weight), *(m.adapter or ())[:2])):
            raise ValueError("weights that are not dense")
        self._heads, self._output, self._down = matrices[:3], matrices[3:4], matrices[6:]
        self._inner = [m for m in matrices[4:6] if m]
        if any(len({m.bias is None for m in together}) > 1 for together in (self._heads, self._inner)):
            raise ValueError("biases of some products of one input")
        if any(len({_bits(m.weight) for m in together}) > 1 for together in (self._heads, self._inner)):
            raise ValueError("products of one input packed in some ways")
        self._norms, self._norm_biases, self._eps, self._adds_one = norms, norm_biases, eps, adds_one
        self._scaling, self._activation = scaling, activation

    def __call__(self, hidden: Tensor, cosines: Tensor | None, sines: Tensor | None, keys: Tensor, values: Tensor,
                 pages: Tensor, positions: Tensor, width: int) -> Tensor:
        """As the definition's."""
        rows, dim = len(hidden), keys.shape[-1]
        x = hidden.reshape(rows, -1)
        heads = product(self._norm(0, x), self._heads)
        num_queries, num_keys = (m.weight.shape[0] // dim for m in self._heads[:2])
        self._place(heads, num_queries, num_keys, cosines, sines)
        query, key, value = (part.unflatten(1, (-1, 1, dim)) for part in
                             heads.split([num_queries * dim, num_keys * dim, num_keys * dim], 1))
        attended = decode_attention(query, key, value, keys, values, pages, positions, width, scaling=self._scaling)
        x = product(attended.reshape(rows, -1), self._output, residual=x)
        inner = product(self._norm(1, x), self._inner, activation=self._activation, is_gated=len(self._inner) == 2)
        return product(inner, self._down, residual=x).view_as(hidden)

    def _norm(self, index: int, x: Tensor) -> Tensor:
        weight, bias = self._norms[index], self._norm_biases[index]
        out, block = torch.empty_like(x), triton.next_power_of_2(x.shape[1])
        _norm_row[(len(x),)](x, weight, out if bias is None else bias, out, x.shape[1], self._eps,
                             HAS_BIAS=bias is not None, ADDS_ONE=self._adds_one, BLOCK=block,
                             num_warps=min(16, max(4, block // 1024)), **_overlap(x.device))
        return out

    def _place(self, heads: Tensor, num_queries: int, num_keys: int, cosines: Tensor | None, sines: Tensor | None
               ) -> None:
        """Norms and rotation of the query and key heads."""
        _, _, query_norm, key_norm = self._norms
        if cosines is None and query_norm is None:
            return
        rows, row_size = heads.shape
        dim = row_size // (num_queries + 2 * num_keys)
        angles = [heads, heads] if cosines is None else [cosines.contiguous(), sines.contiguous()]
        angle_b = 0 if cosines is None or len(cosines) == 1 else dim
        norms = [heads, heads] if query_norm is None else [query_norm, key_norm]
        _place_heads[rows, num_queries + num_keys](
            heads, *norms, *angles, num_queries, row_size, dim // 2, angle_b, self._eps,
            HAS_NORM=query_norm is not None, ADDS_ONE=self._adds_one, HAS_ANGLES=cosines is not None,
            BLOCK=triton.next_power_of_2(dim // 2), num_warps=1, **_overlap(heads.device))
