"""Page-locked (pinned) CPU memory that a card copies to and from."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class HostBlock:
    """`size` bytes, page-locked for a card, which then copies asynchronously and several times faster. Where the system
    refuses that (WSL2 and limits of locked memory allow little), the memory is pageable, with one warning.

    The size is as asked: torch's own page-locked memory is rounded up to a power of two, and kept when it is freed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self.is_locked = size > 0 and device.type == "cuda" and _lock(self.bytes)
        if self.is_locked:  # the finalizer holds the memory until it is unlocked
            weakref.finalize(self, _unlock, torch.cuda.cudart(), self.bytes).atexit = False

    def part(self, offset: int, size: int) -> Tensor:
        """Bytes of the block, not a copy."""
        return self.bytes[offset: offset + size]


def pinned_like(tensor: Tensor) -> Tensor:
    """An empty CPU tensor in the form of `tensor`, page-locked where that is possible."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    except RuntimeError as error:
        _warn_once(tensor.numel() * tensor.element_size(), str(error).splitlines()[0])
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _lock(block: Tensor) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
    if code:
        _warn_once(block.numel(), f"CUDA error {code}")
        _forget_error()
    return code == 0


def _unlock(runtime: Any, block: Tensor) -> None:
    runtime.cudaHostUnregister(block.data_ptr())


def _forget_error() -> None:
    """Clear CUDA's last error, for which the next kernel would be blamed."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


_reasons: set[str] = set()


def _warn_once(size: int, reason: str) -> None:
    if not _reasons:
        _log.warning("%.1f GiB of the computer's memory could not be page-locked (%s): what waits there takes longer "
                     "to come back", size / 2**30, reason)
    _reasons.add(reason)
