"""A simulated card: `with simulated_card() as card:` the program finds one NVIDIA card, cuda:0. See card.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

from hybrid_rlhf import kernels
from hybrid_rlhf.kernels import cuda  # noqa: F401 - kernels.cuda
from tests.engine.decode import tape
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
    with device.answered(card), cuda_api.answered(card), _deepspeed_looks_again(), _kernels(has_triton), card:
        yield card


@contextmanager
def _kernels(has_triton: bool) -> Iterator[None]:
    kernels.ops_for.cache_clear()
    try:
        with nullcontext() if has_triton else mock.patch.object(kernels.cuda, "load", return_value=tape.OPS):
            yield
    finally:
        kernels.ops_for.cache_clear()


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
