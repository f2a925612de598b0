"""Memory that torch's operations take on a card beside their results: scores of attention, buffers of sorts and
products. The rules are those of ATen/native/transformers/cuda/sdp_utils.cpp and native/cuda/SortStable.cu (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.simulated_card.card import Card

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"}
_SMALL_SORT = 4096  # numbers of a row that one block of threads sorts where they are
_MANY_ROWS, _LONG_ROW = 128, 1_000_000


def of_products(capability: tuple[int, int]) -> int:
    """cuBLAS's buffer, taken by the first product and kept."""
    return 32 << 20 if capability == (9, 0) else (8 << 20) + (128 << 10)


def of_sort(x: Tensor, dim: int) -> int:
    """Bytes beside values and indices: a second copy of both for the passes of a radix sort, and the places; of some
    rows, which are sorted as one, places and rows twice."""
    length = x.shape[dim] if x.dim() else 1
    if length <= _SMALL_SORT:
        return 0
    rows = x.numel() // length
    if rows == 1 or length >= _LONG_ROW:
        return length * (8 + x.itemsize + 8)
    return x.numel() * (x.itemsize + 8 + (16 if rows < _MANY_ROWS else 8))


def attention(card: Card, plain: Callable) -> Callable:
    """torch's scaled_dot_product_attention: what none of a card's fused kernels takes is computed operation by
    operation, with scores in fp32 and keys and values for every head, as the card's fallback does."""
    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
               is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False) -> Tensor:
        named = dict(attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if (card.is_quiet or hasattr(query, "fake_mode") or not card.holds(query)
                or _is_fused(card.capability, query, key, value, attn_mask, is_causal)):
            return plain(query, key, value, **named)
        return torch.ops.aten._scaled_dot_product_attention_math(query, key, value, **named)[0]

    return attend


def _is_fused(capability: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
              is_causal: bool) -> bool:
    """FlashAttention takes grouped heads, and no mask; the memory-efficient kernel takes a mask, and no groups. cuDNN's
    is off (engine/device_memory.py)."""
    is_16_bit, has_bf16 = query.dtype in (torch.float16, torch.bfloat16), capability >= (8, 0)
    same_size = query.shape[-1] == value.shape[-1] <= 256
    if mask is None and has_bf16 and is_16_bit and same_size and not (is_causal and query.shape[2] != key.shape[2]):
        return True
    is_known = query.dtype in (torch.float32, torch.float16) or (query.dtype == torch.bfloat16 and has_bf16)
    is_aligned = all(t.shape[-1] * t.itemsize % 16 == 0 for t in (query, value))
    return is_known and is_aligned and query.shape[1] == key.shape[1]
