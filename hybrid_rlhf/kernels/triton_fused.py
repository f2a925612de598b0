"""Norms, gates and rotary positions in Triton, forward and backward, for kernels/gradients.py: fused_by. Their
definitions are in kernels/reference.py; kernels/fusions.py compares them with a model's own code before it uses them.

All arithmetic is in fp32; numbers are rounded where the definitions round them. Gradients of norm weights are sums of
partial sums whose number depends on the card alone, so they are the same in every run.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_rlhf.kernels.ops import LONGEST_NORM

_TILE = 2048  # numbers that a program of a norm reads together, or a row where that is longer
_BLOCK = 1024  # numbers of one program of a gate


# -- norms -------------------------------------------------------------------------------------------------------------


@triton.jit
def _normalised(x, rows, dims, num_rows, size, eps, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_R, BLOCK_D) offsets and mask of some rows, the factor of each row, and the scaled numbers in fp32."""
    places = rows.to(tl.int64)[:, None] * size + dims[None, :]
    inside = (rows < num_rows)[:, None] & (dims < size)[None, :]
    wide = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)
    return places, inside, factor, wide * factor[:, None]


@triton.jit
def _norm(x, weight, out, num_rows, size, eps, ADDS_ONE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (tiles of BLOCK_R rows,)."""
    rows, dims = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    places, inside, _, scaled = _normalised(x, rows, dims, num_rows, size, eps, BLOCK_R, BLOCK_D)
    w = tl.load(weight + dims, mask=dims < size, other=0.0).to(tl.float32)[None, :]
    if ADDS_ONE:
        result = scaled * (1.0 + w)
    else:
        result = scaled.to(out.dtype.element_ty).to(tl.float32) * w
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(gradient, x, weight, by_x, by_weight, num_rows, size, eps, ADDS_ONE: tl.constexpr,
                   BY_WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (parts,): each takes every parts-th tile. by_weight (parts, size) fp32: the sums of a part's rows."""
    dims = tl.arange(0, BLOCK_D)
    w = tl.load(weight + dims, mask=dims < size, other=0.0).to(tl.float32)[None, :]
    if ADDS_ONE:
        w = 1.0 + w
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(tl.program_id(0) * BLOCK_R, num_rows, tl.num_programs(0) * BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        places, inside, factor, scaled = _normalised(x, rows, dims, num_rows, size, eps, BLOCK_R, BLOCK_D)
        by_out = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        by_scaled = by_out * w
        mean = tl.sum(by_scaled * scaled, 1) / size
        result = factor[:, None] * (by_scaled - scaled * mean[:, None])
        tl.store(by_x + places, result.to(by_x.dtype.element_ty), mask=inside)
        if BY_WEIGHT:
            rounded = scaled if ADDS_ONE else scaled.to(x.dtype.element_ty).to(tl.float32)
            total += tl.sum(tl.where(inside, by_out * rounded, 0.0), 0)
    if BY_WEIGHT:
        tl.store(by_weight + tl.program_id(0) * size + dims, total, mask=dims < size)


def _norm_form(size: int) -> dict[str, int]:
    """How a norm is compiled. ValueError for too long rows; kernels/fusions.py then keeps the model's own code."""
    if size > LONGEST_NORM:
        raise ValueError(f"a norm over {size} numbers; at most {LONGEST_NORM}")
    block = triton.next_power_of_2(size)
    return dict(BLOCK_R=max(1, _TILE // block), BLOCK_D=block, num_warps=min(16, max(4, block // 1024)))


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def rms_norm(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> Tensor:
    """kernels/reference.py: rms_norm."""
    x, weight = x.contiguous(), weight.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    form, num_rows = _norm_form(size), x.numel() // size
    if num_rows:
        _norm[(triton.cdiv(num_rows, form["BLOCK_R"]),)](x, weight, out, num_rows, size, eps, ADDS_ONE=adds_one, **form)
    return out


def rms_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float, adds_one: bool,
                      by_weight: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients by x and, if `by_weight`, by the weight."""
    gradient, x, weight = gradient.contiguous(), x.contiguous(), weight.contiguous()
    by_x, size = torch.empty_like(x), x.shape[-1]
    form, num_rows = _norm_form(size), x.numel() // size
    parts = min(triton.cdiv(num_rows, form["BLOCK_R"]), 4 * _num_processors(x.device))
    sums = x.new_empty(parts if by_weight else 0, size, dtype=torch.float32)
    if num_rows:
        _norm_backward[(parts,)](gradient, x, weight, by_x, sums if by_weight else by_x, num_rows, size, eps,
                                 ADDS_ONE=adds_one, BY_WEIGHT=by_weight, **form)
    return by_x, sums.sum(0).to(weight.dtype) if by_weight else None


# -- gates -------------------------------------------------------------------------------------------------------------


@triton.jit
def _activated(x, IS_GELU: tl.constexpr):
    """act(x) and its derivative, of SiLU or of GELU by its tanh formula."""
    if IS_GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        value, derivative = 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value, derivative = x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    return value, derivative


@triton.jit
def _gate(gate, up, out, count, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value, _ = _activated(tl.load(gate + places, mask=inside, other=0.0).to(tl.float32), IS_GELU)
    rounded = value.to(out.dtype.element_ty).to(tl.float32)
    result = rounded * tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(gradient, gate, up, by_gate, by_up, count, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    by_out = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
    value, derivative = _activated(tl.load(gate + places, mask=inside, other=0.0).to(tl.float32), IS_GELU)
    factor = tl.load(up + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(by_gate + places, (by_out * factor * derivative).to(by_gate.dtype.element_ty), mask=inside)
    tl.store(by_up + places, (by_out * value).to(by_up.dtype.element_ty), mask=inside)


def gated(gate: Tensor, up: Tensor, is_gelu: bool = False) -> Tensor:
    """kernels/reference.py: gated."""
    gate, up = gate.contiguous(), up.contiguous()
    out, count = torch.empty_like(gate), gate.numel()
    if count:
        _gate[(triton.cdiv(count, _BLOCK),)](gate, up, out, count, IS_GELU=is_gelu, BLOCK=_BLOCK, num_warps=4)
    return out


def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor, is_gelu: bool) -> tuple[Tensor, Tensor]:
    """Gradients by gate and up."""
    gradient, gate, up = gradient.contiguous(), gate.contiguous(), up.contiguous()
    by_gate, by_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if count:
        _gate_backward[(triton.cdiv(count, _BLOCK),)](gradient, gate, up, by_gate, by_up, count, IS_GELU=is_gelu,
                                                      BLOCK=_BLOCK, num_warps=4)
    return by_gate, by_up


# -- rotary positions --------------------------------------------------------------------------------------------------


@triton.jit
def _turn(x, cosines, sines, out, num_heads, length, half, x_b, x_h, x_q, out_b, out_h, out_q, angle_b, angle_q,
          BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (rows x length, tiles of BLOCK_H heads): the heads of one token, halves paired."""
    row, token = (tl.program_id(0) // length).to(tl.int64), (tl.program_id(0) % length).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    inside, is_dim = (heads < num_heads)[:, None] & (dims < half)[None, :], dims < half
    angles = row * angle_b + token * angle_q + dims
    first = x + row * x_b + token * x_q + heads.to(tl.int64)[:, None] * x_h + dims[None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    cos_a, cos_b = (tl.load(cosines + angles, mask=is_dim, other=0.0).to(tl.float32)[None, :],
                    tl.load(cosines + angles + half, mask=is_dim, other=0.0).to(tl.float32)[None, :])
    sin_a, sin_b = (tl.load(sines + angles, mask=is_dim, other=0.0).to(tl.float32)[None, :],
                    tl.load(sines + angles + half, mask=is_dim, other=0.0).to(tl.float32)[None, :])
    place = out + row * out_b + token * out_q + heads.to(tl.int64)[:, None] * out_h + dims[None, :]
    tl.store(place, (a * cos_a - b * sin_a).to(out.dtype.element_ty), mask=inside)
    tl.store(place + half, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=inside)


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)  # with the strides of x, where those are dense
    (rows, num_heads, length, dim), block = x.shape, triton.next_power_of_2(x.shape[-1] // 2)
    heads = min(triton.next_power_of_2(num_heads), max(1, _TILE // block))
    if x.numel():
        _turn[rows * length, triton.cdiv(num_heads, heads)](
            x, cosines, sines, out, num_heads, length, dim // 2, *x.stride()[:3], *out.stride()[:3],
            cosines.stride(0) if cosines.shape[0] > 1 else 0, cosines.stride(1), BLOCK_H=heads, BLOCK_D=block,
            num_warps=4)
    return out


def rotary(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """kernels/reference.py: rotary."""
    cosines, sines = cosines.contiguous(), sines.contiguous()
    return _turned(query, cosines, sines), _turned(key, cosines, sines)
