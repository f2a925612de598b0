"""What a device's kernels are: two operations with the signatures that kernels/reference.py defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Ops(NamedTuple):
    """The operations of one device. name is for people: "reference", "cpu (C++)", "cuda (Triton)"."""

    name: str
    decode_attention: Callable
    sample: Callable


class KernelsUnavailableError(Exception):
    """A device's kernels cannot be had here; the message says why in one line."""
