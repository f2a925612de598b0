"""The table of a device's kernels: operations with the signatures that kernels/reference.py defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

PAGE_COLUMNS = 128  # of a page of a card's cache: a multiple of the columns that its attention reads at a time
LONGEST_NORM = 8192  # longest row of the norm kernel of a card; the backward of longer ones spills registers


class Fused(NamedTuple):
    """Fused chains of small operations, with gradients, for kernels/fusions.py; kernels/reference.py defines them."""

    rms_norm: Callable
    gated: Callable
    rotary: Callable


class Updates(NamedTuple):
    """The operations of an optimizer step, in place on the CPU; kernels/reference.py defines both."""

    adamw: Callable
    sum_of_squares: Callable


class Ops(NamedTuple):
    """The operations of one device. name is for people: "reference", "cpu (C++)", "cuda (Triton)".

    linear(input, weight, bias): nn.Linear without gradients, for kernels/fusions.py, of weights in linear_dtypes,
    in which torch's products are slower; None where there are none. fused: None where nothing is fused.
    causal_attention: of whole sequences, with gradients; None where torch's own is as fast.
    adapted_linear(input, weight, bias, down, up, scaling): linear + scaling up (down input), as `linear` is.
    decode_layer: the class DecodeLayer of kernels/reference.py for weights in linear_dtypes and, where its takes_packed
    says so, for packed ones; None where there is none.
    token_scores: log-probabilities and entropies from logits, with gradients; None where torch's own operations do it.
    updates: an optimizer's step; None where torch's own do it.
    """

    name: str
    decode_attention: Callable
    sample: Callable
    linear: Callable | None = None
    linear_dtypes: frozenset[torch.dtype] = frozenset()
    fused: Fused | None = None
    causal_attention: Callable | None = None
    adapted_linear: Callable | None = None
    decode_layer: Callable | None = None
    token_scores: Callable | None = None
    updates: Updates | None = None


class KernelsUnavailableError(Exception):
    """A device's kernels are not available here; the message says why in one line."""
