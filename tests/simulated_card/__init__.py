"""A simulated card: `with simulated_card() as card:` the program finds one NVIDIA card, cuda:0. See card.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from hybrid_rlhf import kernels
from hybrid_rlhf.kernels import cuda, reference  # noqa: F401 - kernels.cuda
from hybrid_rlhf.kernels.ops import Fused, Ops
from tests.simulated_card import cuda_api, device
from tests.simulated_card.card import AMPERE, HOPPER, Card, Wait

__all__ = ["AMPERE", "HOPPER", "Card", "Wait", "simulated_card"]


@contextmanager
def simulated_card(*, has_triton: bool = False, **settings: object) -> Iterator[Card]:
    """settings: those of Card. has_triton: Triton's kernels run, in its interpreter, which must have been chosen before
    Triton was imported (TRITON_INTERPRET=1); else their place is taken by torch's operations, which are faster.
    """
    with suppress(ImportError):
        import bitsandbytes  # noqa: F401 - chooses its library at import, and the processor's is the one that runs
    card = Card(**settings)
    with device.answered(card), cuda_api.answered(card), _deepspeed_looks_again(), _kernels(card, has_triton), card:
        yield card


@contextmanager
def _kernels(card: Card, has_triton: bool) -> Iterator[None]:
    _forget()
    try:
        with nullcontext() if has_triton else mock.patch.object(kernels.cuda, "load", return_value=_stand_ins(card)):
            yield
    finally:
        _forget()


def _forget() -> None:
    """What is known of a card, for the next one may be another."""
    kernels.ops_for.cache_clear()
    with suppress(ImportError):
        from hybrid_rlhf.kernels import triton_attention, triton_fused, triton_layer

        for known in (triton_attention.card_of, triton_fused._num_processors, triton_layer._overlap,
                      triton_layer._counters):
            known.cache_clear()


def _stand_ins(card: Card) -> Ops:
    """Torch's operations in the place of Triton's kernels."""
    fused = Fused(*(_as_compiled(card, "triton_fused", name) for name in Fused._fields))
    return Ops("stand-ins of a simulated card", _as_compiled(card, "triton_attention", "decode_attention"),
               _as_compiled(card, "triton_sampling", "sample"), fused=fused)


def _as_compiled(card: Card, module: str, name: str) -> Callable:
    """The program around the kernels with its launches, copies and buffers; the definition's numbers in its results."""
    definition = getattr(reference, name)
    try:
        program = getattr(import_module(f"hybrid_rlhf.kernels.{module}"), name)
    except ImportError:
        return definition

    def kernel(*given: object, **named: object) -> object:
        if card.recording is not None or torch.is_grad_enabled():  # operation by operation, for replays and gradients
            return definition(*given, **named)
        out = program(*given, **named)
        with card.quiet():
            for result, numbers in zip(tree_leaves(out), tree_leaves(definition(*given, **named)), strict=True):
                result.copy_(numbers)
        return out

    return kernel


@contextmanager
def _deepspeed_looks_again() -> Iterator[None]:
    """DeepSpeed chooses its accelerator once in a process."""
    import deepspeed.accelerator.real_accelerator as chosen

    before, chosen.ds_accelerator = chosen.ds_accelerator, None
    named = os.environ.pop("DS_ACCELERATOR", None)
    try:
        yield
    finally:
        chosen.ds_accelerator = before
        if named is not None:
            os.environ["DS_ACCELERATOR"] = named
