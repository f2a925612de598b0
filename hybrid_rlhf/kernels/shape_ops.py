"""Our operations as shapes without arithmetic: a plan runs them in place of the kernels, on fake tensors.

`telling` reports them to a listener that counts operations, for aten's operations in here only make empty tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from hybrid_rlhf.kernels import cpu, cuda, reference
from hybrid_rlhf.kernels.gradients import causal_attention_by, fused_by, token_scores_by
from hybrid_rlhf.kernels.ops import LONGEST_NORM, Fused, Ops

TRIAL = Fused(reference.rms_norm, reference.gated, reference.rotary)  # by which fusions are found without computing


def shape_ops(device_type: str) -> Ops:
    """The training operations of a device ("cpu", "cuda"), which make their outputs and leave them empty.

    decode_attention and sample are missing, for no counted code calls them. Nothing is compiled or loaded.
    """
    if device_type == "cuda" and cuda.can_load():
        return Ops("shapes (cuda)", _missing, _missing, fused=_FUSED._replace(rms_norm=_card_norm),
                   token_scores=_SCORES)
    if device_type == "cpu" and cpu.can_load():
        return Ops("shapes (cpu)", _missing, _missing, fused=_FUSED, token_scores=_SCORES,
                   causal_attention=causal_attention_by(_KERNELS) if cpu.has_wide_vectors() else None)
    return Ops("shapes", _missing, _missing)


_listeners: list[Callable[[str, tuple, object], None]] = []


@contextmanager
def telling(listener: Callable[[str, tuple, object], None]) -> Iterator[None]:
    """Within the block `listener` is called with every operation of ours: its name, its inputs and its outputs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _reported(name: str, function: Callable) -> Callable:
    @wraps(function)
    def call(*inputs: object, **named: object):  # noqa: ANN202 - the function's own
        outputs = function(*inputs, **named)
        for listener in _listeners:
            listener(name, inputs, outputs)
        return outputs

    return call


def _missing(*_inputs: object, **_named: object) -> None:
    raise NotImplementedError("shapes alone do not decode")


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t) for t in tensors)


def _attention(query: Tensor, _key: Tensor, value: Tensor, *, scaling: float,
               with_normalisers: bool = False) -> tuple[Tensor, Tensor | None]:
    batch, heads, length, _ = query.shape
    return (query.new_empty(batch, length, heads, value.shape[-1]),
            query.new_empty(batch, heads, length, dtype=torch.float32) if with_normalisers else None)


def _scores(logits: Tensor, _targets: Tensor, _temperature: float, with_entropy: bool) -> tuple[Tensor, ...]:
    numbers = [logits.new_empty(count, dtype=torch.float32)
               for count in (len(logits), len(logits) if with_entropy else 0, len(logits))]
    return numbers[0], numbers[1], logits.new_empty(len(logits), dtype=torch.bool), numbers[2]


def _card_norm(x: Tensor, weight: Tensor, eps: float, adds_one: bool = False) -> Tensor:
    """Rows that are too long for a card's kernel keep the model's own norm, which computes as the definition does."""
    return (_FUSED if x.shape[-1] <= LONGEST_NORM else reference).rms_norm(x, weight, eps, adds_one)


class _Flash(torch.autograd.Function):
    """FlashAttention (2307.08691): kept for the backward pass are inputs, output and one fp32 number per query."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, normalisers = _KERNELS.causal_attention(query, key, value, scaling=1.0, with_normalisers=True)
        ctx.save_for_backward(query, key, value, out, normalisers)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, normalisers = ctx.saved_tensors
        return _KERNELS.causal_attention_backward(gradient, query, key, value, normalisers)


def flash(original: Callable, module: object, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
          **named: object) -> tuple[Tensor, None]:
    """Torch's attention on a card, in transformers' interface: a plan may be made where there is no card."""
    if mask is None:
        return _Flash.apply(query, key, value), None
    return original(module, query, key, value, mask, **named)


_KERNELS = SimpleNamespace(**{name: _reported(name, function) for name, function in {
    "rms_norm": lambda x, *_settings: torch.empty_like(x),
    "rms_norm_backward": lambda _gradient, x, weight, _eps, _one, by_weight: (
        torch.empty_like(x), torch.empty_like(weight) if by_weight else None),
    "gated": lambda gate, *_others: torch.empty_like(gate),
    "gated_backward": lambda _gradient, gate, up, _is_gelu: _like(gate, up),
    "rotary": lambda query, key, *_angles: _like(query, key),
    "token_scores": _scores,
    "token_scores_backward": lambda logits, *_others: logits.new_empty(logits.shape),
    "causal_attention": _attention,
    "causal_attention_backward": lambda _gradient, query, key, value, _normalisers, **_named: _like(query, key, value),
}.items()})
_FUSED, _SCORES = fused_by(_KERNELS), token_scores_by(_KERNELS)
