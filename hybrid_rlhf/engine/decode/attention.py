"""Attention and mask functions that inference mode plugs into a model; they read the current step from the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_rlhf.engine.decode.kv_cache import SlotCache, Step
from hybrid_rlhf.kernels import Ops
from hybrid_rlhf.models.hf_attention import CACHE_NAMES

# Arguments that our attention ignores: positions are in the step, windows and chunks in the mask.
IGNORED_ARGUMENTS = frozenset((*CACHE_NAMES, "position_ids", "use_cache", "output_attentions", "output_hidden_states",
                               "return_dict", "sliding_window", "cache_position", "position_embeddings",
                               "output_router_logits", "layer_idx", "shared_kv_states", "is_causal"))
MAX_KERNEL_PROMPT = 1024  # tokens: up to here our kernel takes 0.2-0.4 (bf16) and 0.55-0.75 (fp32) of torch's time


class SlotAttention:
    """Attention over the slots of `cache`, which is set before each forward."""

    def __init__(self, ops: Ops, causal: Callable) -> None:
        self.ops, self._causal = ops, causal
        self.cache: SlotCache | None = None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None,
               s_aux: Tensor | None = None, **others: object) -> tuple[Tensor, None]:
        """transformers' attention interface: (B, H, Q, D) -> (B, Q, H, Dv), None.

        Raises TypeError for an unknown argument instead of ignoring it.
        """
        unknown = [n for n, v in others.items() if v is not None and n not in IGNORED_ARGUMENTS]
        if unknown:
            raise TypeError(f"attention with {', '.join(unknown)}")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        step = self.cache.step
        layer = step.owner_of(key, value)
        if step.is_prefill:
            if layer is not None:  # from the next token on, this function may write the columns of the layer
                self.cache.fused_cache_write.add(layer.index)
            mask = self._dense_mask(attention_mask, step)
            if (mask is None and softcap is None and s_aux is None and self.ops.causal_attention
                    and query.shape[2] <= MAX_KERNEL_PROMPT):
                return self.ops.causal_attention(query, key, value, scaling=scaling), None
            return dense_attention(query, key, value, mask, scaling, softcap, s_aux), None
        if layer is not None:
            if _is_row_mask(attention_mask):
                row_mask = None if attention_mask is None else attention_mask[:, 0, 0]
                return self.ops.decode_attention(
                    query, key, value, layer.keys, layer.values, self.cache.row_pages(), step.positions[:, 0],
                    step.width, scaling=scaling, softcap=softcap, sinks=s_aux, mask=row_mask), None
            layer.write(key, value)
            key, value = layer.columns()
        return dense_attention(query, key, value, self._dense_mask(attention_mask, step), scaling, softcap, s_aux), None

    def _dense_mask(self, mask: Tensor | None, step: Step) -> Tensor | None:
        """The mask as a tensor, or None in a prefill from the start, which is causal."""
        if mask is not None or (step.is_prefill and not step.goes_on):
            return mask
        places = step.places
        return torch.arange(step.width, device=places.device) <= places[:, None, :, None]

    def mask(self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Callable,
             local_size: int | None = None, **_others: object) -> Tensor | None:
        """transformers' mask interface: (B, 1, Q, W) bool, or None where the mask is plainly causal."""
        if mask_function is self._causal or (local_size is not None and kv_length <= local_size):
            return None
        return self.bool_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length,
                              mask_function=mask_function)

    def bool_mask(self, *, batch_size: int, kv_length: int, mask_function: Callable, **_others: object) -> Tensor:
        """The mask evaluated at each row's own positions: true where a token may attend."""
        positions = self.cache.step.places
        rows = torch.arange(batch_size, device=positions.device)[:, None, None, None]
        columns = torch.arange(kv_length, device=positions.device)[None, None, None]
        seen = mask_function(rows, torch.zeros_like(rows[:1]), positions[:, None, :, None], columns)
        # always causal: a model's mask may narrow this, but not show later or unwritten columns, except in an image
        if not self.cache.step.sees_ahead:
            seen = seen & (columns <= positions[:, None, :, None])
        return seen.expand(batch_size, 1, -1, -1)

    def float_mask(self, *, dtype: torch.dtype = torch.float32, **named: object) -> Tensor:
        """`bool_mask` as numbers to add: 0, or the smallest of the dtype where masked."""
        seen = self.bool_mask(**named)
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _is_row_mask(mask: Tensor | None) -> bool:
    return mask is None or (mask.dtype == torch.bool and mask.shape[1:3] == (1, 1))


def dense_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float,
                    softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """(B, H, Q, D), (B, K, W, D), (B, K, W, Dv) -> (B, Q, H, Dv). mask None is causal, with Q = W."""
    repeats = query.shape[1] // key.shape[1]
    if softcap is None and sinks is None:
        if repeats > 1 and query.device.type == "cuda":
            return _grouped_attention(query, key, value, mask, scaling)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
                                             enable_gqa=repeats > 1)
        return out.transpose(1, 2)
    key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
    scores = (query @ key.mT).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    return (weights @ value).transpose(1, 2)


def takes_groups(query: Tensor, value: Tensor) -> bool:
    """Whether torch's fused kernels take grouped heads of these (B, H, Q, D) on their card, where there is no mask: in
    16 bits, from Ampere on. What is left to torch makes (B, H, Q, W) scores in fp32."""
    is_taken = query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256
    return is_taken and torch.cuda.get_device_capability(query.device)[0] >= 8


def _grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """As dense_attention. On a card torch's fused kernels take grouped heads without a mask only."""
    heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    attend = partial(F.scaled_dot_product_attention, scale=scaling)
    if mask is None and takes_groups(query, value):
        out = attend(query, key, value, is_causal=True, enable_gqa=True)
    elif mask is None or mask.shape[1] > 1:
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        out = attend(query, key, value, attn_mask=mask, is_causal=mask is None)
    else:  # the heads of a group as further queries of one head: nothing of the columns is copied
        if mask.dtype == torch.bool:  # torch would make it after the copies, which are then held twice
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        mask = mask.expand(-1, -1, query.shape[2], -1).repeat(1, 1, repeats, 1)
        query = query.unflatten(1, (heads, repeats)).flatten(2, 3)
        out = attend(query, key, value, attn_mask=mask).unflatten(2, (repeats, -1)).flatten(1, 2)
    return out.transpose(1, 2)
