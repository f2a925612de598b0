"""Faster, equivalent operations for what a model computes in training mode, plugged in while an engine computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.decode.attention import takes_groups
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.kernels import Ops, ops_for
from hybrid_rlhf.kernels.fusions import Fusions, find_fusions
from hybrid_rlhf.models.hf_attention import without_padding_check
from hybrid_rlhf.models.lora_products import fused_adapters
from hybrid_rlhf.models.transformers_compat import sdpa_replaced

MAX_LENGTH = 1024  # tokens: up to here forward and backward take 0.15-0.4 (bf16) and 0.6 (fp32) of torch's time

_fusions: WeakKeyDictionary[nn.Module, Fusions] = WeakKeyDictionary()


@contextmanager
def training_forms(module: nn.Module) -> Iterator[None]:
    """Within the block forwards of `module`, and their backwards, take our attention, fused operations and fused
    adapters where those compute the same; attention with a mask, a dropout or a cache stays as it was.
    """
    ops = ops_for(next(module.parameters()).device.type)
    with ExitStack() as stack:
        stack.enter_context(attention_by(ops))
        stack.enter_context(without_padding_check(module))
        if not is_partitioned(module):  # ZeRO 3 gathers a layer's weights when that layer itself is called
            if module not in _fusions:
                _fusions[module] = find_fusions(module, ops.fused)
            stack.enter_context(_fusions[module].swapped())
            stack.enter_context(fused_adapters(module))
        yield


def attention_by(ops: Ops) -> AbstractContextManager:
    """The block in which models whose attention is "sdpa" use that of `ops`, where there is one and it fits."""
    return sdpa_replaced(partial(attend, ops.causal_attention) if ops.causal_attention else attend_without_groups)


def attend_without_groups(original: Callable, module: object, query: Tensor, key: Tensor, value: Tensor,
                          attention_mask: Tensor | None, *others: object, **named: object) -> tuple[Tensor, None]:
    """transformers' sdpa interface. It leaves groups to torch where there is no mask; where no fused kernel of the card
    takes them, each query head gets its keys and values here, as transformers does it under a mask."""
    repeats = query.shape[1] // key.shape[1]
    if (attention_mask is None and repeats > 1 and query.shape[2] > 1 and query.device.type == "cuda"
            and not takes_groups(query, value)):
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # without a number of groups
    return original(module, query, key, value, attention_mask, *others, **named)


def attend(attention: Callable, original: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
           attention_mask: Tensor | None, dropout: float = 0.0, scaling: float | None = None,
           is_causal: bool | None = None, **others: object) -> tuple[Tensor, None]:
    """transformers' sdpa interface: (B, H, Q, D) -> (B, Q, H, Dv), None. Plainly causal calls go to `attention`, all
    others to `original`."""
    causes = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_ours = (attention_mask is None and causes and not dropout and 1 < query.shape[2] == key.shape[2] <= MAX_LENGTH
               and query.dtype == key.dtype == value.dtype and query.dtype.itemsize <= 4
               and not torch.is_autocast_enabled(query.device.type) and not others.get("output_attentions")
               and all(others.get(name) is None for name in ("softcap", "position_bias", "cache")))
    if is_ours:
        return attention(query, key, value, scaling=query.shape[-1] ** -0.5 if scaling is None else scaling), None
    return original(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
                    **others)
