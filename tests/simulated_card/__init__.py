"""A simulated card: `with simulated_card() as card:` the program finds one NVIDIA card, cuda:0. See card.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

import torch
from torch.utils._pytree import tree_map

from hybrid_rlhf import kernels
from hybrid_rlhf.kernels import cuda, reference  # noqa: F401 - kernels.cuda
from hybrid_rlhf.kernels.ops import Fused, Ops
from tests.simulated_card import cuda_api, device
from tests.simulated_card.card import Card, Wait

__all__ = ["Card", "Wait", "simulated_card"]


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
    kernels.ops_for.cache_clear()
    try:
        with nullcontext() if has_triton else mock.patch.object(kernels.cuda, "load", return_value=_stand_ins(card)):
            yield
    finally:
        kernels.ops_for.cache_clear()


def _stand_ins(card: Card) -> Ops:
    """Torch's operations in the place of Triton's kernels, each of them one launch."""
    fused = Fused(*(_as_one(card, name, getattr(reference, name)) for name in Fused._fields))
    return Ops("stand-ins of a simulated card", _as_one(card, "decode_attention", reference.decode_attention),
               _as_one(card, "sample", reference.sample), fused=fused)


def _as_one(card: Card, name: str, function: Callable) -> Callable:
    def kernel(*given: object, **named: object) -> object:
        if card.recording is not None or torch.is_grad_enabled():  # operation by operation, for replays and gradients
            return function(*given, **named)
        card.launched(name)
        with card.quiet():
            out = function(*given, **named)
        return tree_map(lambda leaf: card.put(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)

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
