"""What a device's kernels are: two operations with the signatures that kernels/reference.py defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ops(NamedTuple):
    """The operations of one device. name is for people: "reference", "cpu (C++)", "cuda (Triton)".

    linear(input, weight, bias): nn.Linear in 16 bits, without gradients, for kernels/products.py; None where torch's
    own is as fast.
    """

    name: str
    decode_attention: Callable
    sample: Callable
    linear: Callable | None = None


class KernelsUnavailableError(Exception):
    """A device's kernels cannot be had here; the message says why in one line."""
