"""How the C library gives memory back on a CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_MOST_BLOCKS = 65536  # mapped by themselves: glibc's default
_THRESHOLD = 2**20  # bytes


def give_back_freed_blocks() -> bool:
    """Let glibc's malloc map every block of 1 MiB or more by itself, so that a freed one is the system's again at once.

    By default the threshold grows with every large block that is freed, up to 32 MiB; activations of a few MiB then
    live in the heap, which fragments and is not given back: measured on a 134M model, 16 x 192 tokens, bf16, 1.90 GB
    for 1.25 GB of activations, of which 1.4 GB stayed after the backward (mapped: 1.25 GB, 11 MB).
    The price is time, for a block that is mapped anew is cleared page by page: a PPO step with LoRA took 8.4 s instead
    of 4.9 (OPT-125m shape, two cores). So it is for runs whose memory is bounded (--memory), not for all.
    Returns whether there was such a malloc.
    """
    return _set(_M_MMAP_MAX, _MOST_BLOCKS) and _set(_M_MMAP_THRESHOLD, _THRESHOLD)


def keep_freed_blocks() -> bool:
    """Let glibc's malloc keep what is freed, so that no page is cleared twice.

    By default blocks above 32 MiB (a chunk of logits, a large weight's gradient) are mapped, cleared and unmapped each
    time, and the end of the heap is given back after every backward pass. A full PPO step (OPT-125m shape) took 200,000
    page faults, 0.3 s of 7 s of processor time; kept, next to none, and the peak was 2% higher (5.25 GB for 5.13). What
    is held stays at the peak until the process ends, so a run whose memory is bounded (--memory) does the opposite.
    Returns whether there was such a malloc.
    """
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, -1)


def _set(parameter: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1
