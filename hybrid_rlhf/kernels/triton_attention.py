"""Decode attention with cache write in Triton. kernels/reference.py: decode_attention is its definition.

One program reads one part (split) of one row's columns for one key head, by all query heads of its group; a second
kernel joins the parts of long contexts (flash-decoding). The new column is never loaded from memory: the program whose
part it ends stores it in the cache and takes it from registers.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Dtypes of the matrix units; the interpreter (TRITON_INTERPRET=1) reads bf16 as integers there.
_MATRIX_TYPES = (torch.float16,) if knobs.runtime.interpret else (torch.float16, torch.bfloat16)
_SPLIT_COLUMNS = 128  # fewest columns of a program
_MAX_SPLITS = 32
_WHOLE = 1 << 30  # columns of a page that holds all of its row: one kernel for caches of any length
_LARGE = 160 * 1024  # bytes of shared memory of a block on the large cards (A100, H100, B200); small ones have 99 KiB
_LEAST = tl.constexpr(-3.4e38)  # the maximum of columns whose scores are all -inf, as against no columns at all


@triton.jit
def _part(position, split, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """First column of a split, and the column after its last; all splits of a row but the last are of equal size."""
    per = tl.cdiv(tl.cdiv(position + 1, BLOCK_N), NUM_SPLITS) * BLOCK_N
    first = split * per
    return first, tl.minimum(first + per, position + 1)


@triton.jit
def _new_column(source, target, pages, position, row, head, dims, writes, source_b, source_k, target_s, target_k,
                target_c, DIM: tl.constexpr, PAGE: tl.constexpr):
    """The new token's key or value, rounded to the cache's dtype; stored there where `writes`. pages: of its row."""
    new = tl.load(source + row * source_b + head * source_k + dims, mask=dims < DIM, other=0.0)
    new = new.to(target.dtype.element_ty)
    at = tl.maximum(position, 0)
    page = tl.load(pages + at // PAGE)
    place = target + page * target_s + head * target_k + at % PAGE * target_c + dims
    tl.store(place, new, mask=(dims < DIM) & writes)
    return new


@triton.jit
def _columns(base, page, new, columns, position, visible, dims, stride_s, stride_c, DIM: tl.constexpr,
             PAGE: tl.constexpr):
    """(BLOCK_N, BLOCK_D) of keys or values: from the cache, the new column from registers, zeros where not visible.
    All columns are of one page."""
    stored = visible & (columns != position)
    tile = tl.load(base + page * stride_s + (columns % PAGE).to(tl.int64)[:, None] * stride_c + dims[None, :],
                   mask=stored[:, None] & (dims < DIM)[None, :], other=0.0)
    return tl.where((columns == position)[:, None], new[None, :], tile)


@triton.jit
def _visible(mask, row, mask_b, columns, end, HAS_MASK: tl.constexpr):
    visible = columns < end
    if HAS_MASK:
        visible = visible & (tl.load(mask + row * mask_b + columns, mask=visible, other=0) != 0)
    return visible


@triton.jit
def _scored(scores, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    scores = scores * scaling
    if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    return scores


@triton.jit
def _finite(largest):
    """What may be subtracted from scores: the maximum, or 0 where there is none."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _with_sink(total, largest, sink):
    """The sum of a softmax joined by a column of score `sink`, and the factor for what was accumulated before."""
    joint = _finite(tl.maximum(largest, sink))
    scale = tl.exp(largest - joint)
    return total * scale + tl.exp(sink - joint), scale


@triton.jit
def _read_single(q, keys, values, pages, new_key, new_value, mask, row, mask_b, position, first, end, dims, value_dims,
                 keys_s, keys_c, values_s, values_c, scaling, softcap, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                 BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr, HAS_MASK: tl.constexpr,
                 HAS_SOFTCAP: tl.constexpr):
    """One query head over its columns: weighted values (BLOCK_V,), sum of weights, largest score, whether any was seen.

    In plain fp32 arithmetic, as matrix units would idle with one query.
    """
    largest, total, seen = float("-inf"), 0.0, 0
    accumulated = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)  # summed over the columns once, at the end
    for start in range(first, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        visible = _visible(mask, row, mask_b, columns, end, HAS_MASK)
        page = tl.load(pages + start // PAGE)
        k = _columns(keys, page, new_key, columns, position, visible, dims, keys_s, keys_c, DIM, PAGE)
        v = _columns(values, page, new_value, columns, position, visible, value_dims, values_s, values_c, VALUE_DIM,
                     PAGE)
        scores = _scored(tl.sum(q[None, :] * k.to(tl.float32), 1), scaling, softcap, HAS_SOFTCAP)
        scores = tl.where(visible, scores, float("-inf"))
        joint = tl.maximum(largest, tl.max(scores, 0))
        weights, scale = tl.exp(scores - _finite(joint)), tl.exp(largest - _finite(joint))
        total = total * scale + tl.sum(weights, 0)
        accumulated = accumulated * scale + weights[:, None] * v.to(tl.float32)
        largest, seen = joint, tl.maximum(seen, tl.max(visible.to(tl.int32), 0))
    return tl.sum(accumulated, 0), total, largest, seen


@triton.jit(do_not_specialize=["pages_b"])
def _attend_single(query, key, value, keys, values, pages, positions, mask, sinks, out, maxima, totals, pages_b,
                   query_b, query_h, key_b, key_k, value_b, value_k, keys_s, keys_k, keys_c, values_s, values_k,
                   values_c, mask_b, scaling, softcap, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                   GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
                   NUM_SPLITS: tl.constexpr, PAGE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SINKS: tl.constexpr,
                   HAS_SOFTCAP: tl.constexpr):
    """Grid (rows, query heads, splits). For GROUP 1, and where `form_for` does not use matrix units."""
    row, query_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, head = tl.load(positions + row), query_head // GROUP
    pages += row * pages_b
    first, end = _part(position, split, NUM_SPLITS, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    writes = (first <= position) & (position < end) & (query_head % GROUP == 0)
    new_key = _new_column(key, keys, pages, position, row, head, dims, writes, key_b, key_k, keys_s, keys_k, keys_c,
                          DIM, PAGE)
    new_value = _new_column(value, values, pages, position, row, head, value_dims, writes, value_b, value_k, values_s,
                            values_k, values_c, VALUE_DIM, PAGE)
    q = tl.load(query + row * query_b + query_head * query_h + dims, mask=dims < DIM, other=0.0).to(tl.float32)
    result, total, largest, seen = _read_single(
        q, keys + head * keys_k, values + head * values_k, pages, new_key, new_value, mask, row, mask_b,
        position.to(tl.int32), first.to(tl.int32), end.to(tl.int32), dims, value_dims, keys_s, keys_c, values_s,
        values_c, scaling, softcap, DIM, VALUE_DIM, BLOCK_N, BLOCK_V, PAGE, HAS_MASK, HAS_SOFTCAP)
    largest = tl.where(seen > 0, tl.maximum(largest, _LEAST), float("-inf"))
    place = (row * tl.num_programs(1) + query_head) * NUM_SPLITS + split
    if NUM_SPLITS == 1:
        if HAS_SINKS:
            total, scale = _with_sink(total, largest, tl.load(sinks + query_head).to(tl.float32))
            result = result * scale
        result = tl.where(seen > 0, result / total, 0.0)
    else:
        tl.store(maxima + place, largest)
        tl.store(totals + place, total)
    tl.store(out + place * VALUE_DIM + value_dims, result.to(out.dtype.element_ty), mask=value_dims < VALUE_DIM)


@triton.jit
def _read_grouped(q, keys, values, pages, new_key, new_value, mask, row, mask_b, position, first, end, dims, value_dims,
                  keys_s, keys_c, values_s, values_c, scaling, softcap, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                  BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, PAGE: tl.constexpr,
                  HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """The heads of a group (BLOCK_G, BLOCK_D) over their key head's columns, on the matrix units, all in 16 bits.

    Weights are multiplied in two parts, the second being the rounding error: loading the columns is the cost.
    """
    largest = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total, seen = tl.zeros((BLOCK_G,), tl.float32), 0
    accumulated = tl.zeros((BLOCK_G, BLOCK_V), tl.float32)
    for start in range(first, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        visible = _visible(mask, row, mask_b, columns, end, HAS_MASK)
        page = tl.load(pages + start // PAGE)
        k = _columns(keys, page, new_key, columns, position, visible, dims, keys_s, keys_c, DIM, PAGE)
        v = _columns(values, page, new_value, columns, position, visible, value_dims, values_s, values_c, VALUE_DIM,
                     PAGE)
        scores = _scored(tl.dot(q, tl.trans(k)), scaling, softcap, HAS_SOFTCAP)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        joint = tl.maximum(largest, tl.max(scores, 1))
        weights, scale = tl.exp(scores - _finite(joint)[:, None]), tl.exp(largest - _finite(joint))
        total = total * scale + tl.sum(weights, 1)
        coarse = weights.to(v.dtype)
        accumulated = accumulated * scale[:, None] + tl.dot(coarse, v)
        accumulated += tl.dot((weights - coarse.to(tl.float32)).to(v.dtype), v)
        largest, seen = joint, tl.maximum(seen, tl.max(visible.to(tl.int32), 0))
    return accumulated, total, largest, seen


@triton.jit(do_not_specialize=["pages_b"])
def _attend_grouped(query, key, value, keys, values, pages, positions, mask, sinks, out, maxima, totals, pages_b,
                    query_b, query_h, key_b, key_k, value_b, value_k, keys_s, keys_k, keys_c, values_s, values_k,
                    values_c, mask_b, scaling, softcap, num_heads, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
                    GROUP: tl.constexpr, TILES: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
                    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, NUM_SPLITS: tl.constexpr, PAGE: tl.constexpr,
                    HAS_MASK: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Grid (rows, key heads x TILES, splits): BLOCK_G of the GROUP query heads of one key head."""
    row, head, tile = tl.program_id(0), tl.program_id(1) // TILES, tl.program_id(1) % TILES
    position, split = tl.load(positions + row), tl.program_id(2)
    pages += row * pages_b
    first, end = _part(position, split, NUM_SPLITS, BLOCK_N)
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    writes = (first <= position) & (position < end) & (tile == 0)
    new_key = _new_column(key, keys, pages, position, row, head, dims, writes, key_b, key_k, keys_s, keys_k, keys_c,
                          DIM, PAGE)
    new_value = _new_column(value, values, pages, position, row, head, value_dims, writes, value_b, value_k, values_s,
                            values_k, values_c, VALUE_DIM, PAGE)
    members = tile * BLOCK_G + tl.arange(0, BLOCK_G)
    heads, is_head = head * GROUP + members, members < GROUP
    q = tl.load(query + row * query_b + heads[:, None] * query_h + dims[None, :],
                mask=is_head[:, None] & (dims < DIM)[None, :], other=0.0)
    result, total, largest, seen = _read_grouped(
        q, keys + head * keys_k, values + head * values_k, pages, new_key, new_value, mask, row, mask_b,
        position.to(tl.int32), first.to(tl.int32), end.to(tl.int32), dims, value_dims, keys_s, keys_c, values_s,
        values_c, scaling, softcap, DIM, VALUE_DIM, BLOCK_G, BLOCK_N, BLOCK_V, PAGE, HAS_MASK, HAS_SOFTCAP)
    largest = tl.where(seen > 0, tl.maximum(largest, _LEAST), float("-inf"))
    place = (row * num_heads + heads) * NUM_SPLITS + split
    if NUM_SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
            total, scale = _with_sink(total, largest, sink)
            result = result * scale[:, None]
        result = tl.where(seen > 0, result / total[:, None], 0.0)
    else:
        tl.store(maxima + place, largest, mask=is_head)
        tl.store(totals + place, total, mask=is_head)
    tl.store(out + place[:, None] * VALUE_DIM + value_dims[None, :], result.to(out.dtype.element_ty),
             mask=is_head[:, None] & (value_dims < VALUE_DIM)[None, :])


@triton.jit
def _join(parts, maxima, totals, sinks, out, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, NUM_SPLITS: tl.constexpr,
          BLOCK_S: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The splits (rows x heads, NUM_SPLITS, VALUE_DIM) of one row and head, grid (rows, heads), joined into `out`."""
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    splits, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    there = splits < NUM_SPLITS
    largest = tl.load(maxima + place * NUM_SPLITS + splits, mask=there, other=float("-inf"))
    total = tl.load(totals + place * NUM_SPLITS + splits, mask=there, other=0.0)
    top = tl.max(largest, 0)
    scale = tl.exp(largest - _finite(top))
    whole = tl.sum(total * scale, 0)
    part = tl.load(parts + (place * NUM_SPLITS + splits)[:, None] * VALUE_DIM + dims[None, :],
                   mask=there[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(part * scale[:, None], 0)
    if HAS_SINKS:
        whole, factor = _with_sink(whole, top, tl.load(sinks + tl.program_id(1)).to(tl.float32))
        result = result * factor
    result = tl.where(top != float("-inf"), result / whole, 0.0)
    tl.store(out + place * VALUE_DIM + dims, result.to(out.dtype.element_ty), mask=dims < VALUE_DIM)


class Card(NamedTuple):
    """Properties of a device that the kernels depend on. shared_memory: bytes that one block may have."""

    processors: int
    shared_memory: int
    has_matrix_units: bool


@cache
def card_of(device: torch.device) -> Card:
    """The card of `device`; for the interpreter on a CPU, one of few blocks and large tiles."""
    if device.type != "cuda":
        return Card(16, _LARGE, has_matrix_units=True)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)  # ROCm's properties have no such field
    has_matrix_units = properties.major >= 8  # Triton's, from Ampere on
    return Card(properties.multi_processor_count, shared, has_matrix_units)


def num_splits(programs: int, width: int, processors: int) -> int:
    """Parts of every row's columns: enough to give each processor two programs, none smaller than _SPLIT_COLUMNS; a
    power of two, since each number is compiled separately.
    """
    wanted = min(-(-2 * processors // programs), width // _SPLIT_COLUMNS)
    return min(triton.next_power_of_2(wanted), _MAX_SPLITS) if wanted > 1 else 1


class Form(NamedTuple):
    """How a kernel is compiled: the sizes of its tiles, warps and stages. is_grouped: for `_attend_grouped`."""

    is_grouped: bool
    sizes: dict[str, int]
    launch: dict[str, int]


def form_for(card: Card, group: int, dim: int, value_dim: int, is_16_bit: bool) -> Form:
    """The form for a group of query heads to a key head: at least two blocks to a processor, none that spills
    registers, as compiled for each generation (docs/results/kernels.md, benchmarks/compile_kernels.py).

    is_16_bit: query and caches are all in one 16-bit type. Matrix units need at least 16 in each dimension, and a query
    of more than 512 numbers leaves them no registers.
    """
    block_d, block_v = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    if group == 1 or not is_16_bit or not card.has_matrix_units or max(block_d, block_v) > 512:
        wide = max(block_d, block_v)
        columns = min(128, max(1, (8192 if is_16_bit and wide <= 128 else 4096) // wide))
        return Form(False, dict(BLOCK_N=columns, BLOCK_D=block_d, BLOCK_V=block_v), dict(num_warps=8))
    block_d, block_v = max(16, block_d), max(16, block_v)
    wide, is_large = max(block_d, block_v), card.shared_memory >= _LARGE
    columns = min(64, max(16, (8192 if is_large else 4096) // wide))
    heads = min(64 if is_large else 32, max(16, 4096 // wide), max(16, triton.next_power_of_2(group)))
    sizes = dict(BLOCK_N=columns, BLOCK_D=block_d, BLOCK_V=block_v, BLOCK_G=heads, TILES=-(-group // heads))
    return Form(True, sizes, dict(num_warps=4, num_stages=2 if is_large or wide < 512 else 1))


def decode_attention(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, pages: Tensor,
                     positions: Tensor, width: int, *, scaling: float, softcap: float | None = None,
                     sinks: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """kernels/reference.py: decode_attention. The last dimension of the caches must be dense, and a page hold whole
    tiles of columns (ops.PAGE_COLUMNS does), or all columns of a row."""
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError(f"caches with strides {keys.stride()} and {values.stride()}: the last must be 1")
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    mask = mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()
    pages, positions, page = pages.contiguous(), positions.contiguous(), keys.shape[2]
    (rows, num_heads, _, dim), (num_keys, value_dim) = query.shape, values.shape[1::2]
    card, group = card_of(query.device), num_heads // num_keys
    is_16_bit = query.dtype == keys.dtype == values.dtype and query.dtype in _MATRIX_TYPES
    is_grouped, sizes, launch = form_for(card, group, dim, value_dim, is_16_bit)
    if pages.shape[1] == 1:
        page = _WHOLE
    elif page % sizes["BLOCK_N"]:
        raise ValueError(f"pages of {page} columns; the kernel reads {sizes['BLOCK_N']} at a time")
    programs = num_keys * sizes["TILES"] if is_grouped else num_heads
    splits = num_splits(rows * programs, width, card.processors)
    out = query.new_empty(rows, 1, num_heads, value_dim)
    parts = out if splits == 1 else query.new_empty(rows, num_heads, splits, value_dim, dtype=torch.float32)
    maxima, totals = query.new_empty(2, rows, num_heads, splits, dtype=torch.float32).unbind(0)
    any_sinks = out if sinks is None else sinks  # without sinks, a pointer that is never read
    inputs = (query, key, value, keys, values, pages, positions, out if mask is None else mask, any_sinks, parts,
              maxima, totals, pages.shape[1], *query.stride()[:2], *key.stride()[:2], *value.stride()[:2],
              *keys.stride()[:3], *values.stride()[:3], 0 if mask is None else mask.stride(0), scaling, softcap or 0.0)
    constants = dict(DIM=dim, VALUE_DIM=value_dim, GROUP=group, NUM_SPLITS=splits, PAGE=page,
                     HAS_MASK=mask is not None, HAS_SINKS=sinks is not None, HAS_SOFTCAP=softcap is not None, **sizes)
    if is_grouped:
        _attend_grouped[rows, programs, splits](*inputs, num_heads, **constants, **launch)
    else:
        _attend_single[rows, programs, splits](*inputs, **constants, **launch)
    if splits > 1:
        _join[rows, num_heads](parts, maxima, totals, any_sinks, out, VALUE_DIM=value_dim, BLOCK_V=sizes["BLOCK_V"],
                               NUM_SPLITS=splits, BLOCK_S=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None,
                               num_warps=4)
    return out
