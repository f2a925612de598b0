"""Memory of the computer: what is free, how freed blocks go back, and errors that say that it ran out."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_rlhf.core.errors import UserError

# -- The memory that the machine has left ------------------------------------------------------------------------------


def free_host_bytes() -> int | None:
    """Memory that programs can still have without swapping, or None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


# -- Settings of memory allocators: of the C library and oneDNN on a CPU, of torch on a card ---------------------------


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_MOST_BLOCKS = 65536  # mapped by themselves: glibc's default
_THRESHOLD = 2**17  # bytes: glibc begins with it, and raises it unless it is set

# Variables that torch 2.11 to 2.13 reads its allocator's settings from, the first that is there. The first is the old
# name; HIP's is read by builds for ROCm.
CONFIGURED_BY = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# How many compiled products oneDNN and torch's layer above it (ideep) keep, each in a cache of its own, 1,024 by
# default. A forward and backward of a Llama takes 15 different ones, with adapters on all layers 45.
PRODUCT_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
NUM_PRODUCTS = 64


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows, whose driver manages the card's memory."""
    return "microsoft" in platform.uname().release.lower()


def grow_segments() -> bool:
    """Let torch's allocator on a card grow its segments instead of adding more: lengths differ from batch to batch, and
    blocks of many sizes leave holes that no later tensor fits. Returns whether that was set.

    Call it before the first tensor on a card: torch reads the variable once. Nothing is set where the user has set the
    variable, on WSL2, where mapping memory piece by piece fails on some drivers (pytorch issue 192330), and on other
    systems, which do not support it. CUDA graphs need nothing more: their private pools have segments of the old kind
    in some releases of torch and growing ones in others, and either keeps its addresses.
    """
    if not sys.platform.startswith("linux") or is_wsl():
        return False
    if any(name in os.environ for name in CONFIGURED_BY):
        return False
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return True


def bound_product_caches() -> None:
    """Keep at most NUM_PRODUCTS compiled products on a CPU. oneDNN compiles one for each number of rows, and rows are
    tokens, so unequal lengths fill its caches with products that are not used again, 0.4 to 0.6 MiB each: a process of
    227 MiB grew to 900 within 1,500 products, and stays at 272 with both caches bounded. With only one of them bounded
    it went on growing, at half the pace.

    Call it before the first product. Variables that the user has set stay.
    """
    for name in PRODUCT_CACHES:
        os.environ.setdefault(name, str(NUM_PRODUCTS))


def give_back_freed_blocks() -> bool:
    """Let glibc's malloc map every block of 128 KiB or more by itself: a freed one returns to the system at once.

    By default the threshold grows with every large block that is freed, up to 32 MiB; activations then live in the
    heap, which fragments and is not given back. On a 134M model, bf16, LoRA, forward and backward of 2 x 192 tokens,
    whose tensors take 164 MB: by default 252 MB, of which 252 stayed; mapped from 1 MiB 225-257 MB, for states of
    2 x 192 x 768 are below that; mapped from 128 KiB 167 MB, of which 2 stayed.
    The cost is time, for a block that is mapped anew is cleared page by page: that forward and backward took 1.5 s
    instead of 1.1 (one thread). So it is for runs whose memory is bounded (--memory), not for all.
    Returns whether malloc could be set.
    """
    return _set(_M_MMAP_MAX, _MOST_BLOCKS) and _set(_M_MMAP_THRESHOLD, _THRESHOLD)


def keep_freed_blocks() -> bool:
    """Let glibc's malloc keep what is freed, so that no page is cleared twice.

    By default blocks above 32 MiB (a chunk of logits, a large weight's gradient) are mapped, cleared and unmapped each
    time, and the end of the heap is given back after every backward pass. A full PPO step (OPT-125m shape) took 200,000
    page faults, 0.3 s of 7 s of processor time; kept, next to none, and the peak was 2% higher (5.25 GB for 5.13).
    Memory stays at the peak until the process ends, so a run whose memory is bounded (--memory) does the opposite.
    Returns whether malloc could be set.
    """
    return _set(_M_MMAP_MAX, 0) and _set(_M_TRIM_THRESHOLD, -1)


def _set(parameter: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(parameter, value) == 1


# -- Detect out-of-memory errors and report them in one line -----------------------------------------------------------


SMALLER = ("--preset 8gb (12gb, 16gb, 24gb, 48gb, 80gb) chooses settings for a card of that size, and --plan says "
           "before a run what it needs")

# Messages of torch and of the libraries below it. Searched in all lines of an error, in upper and lower case.
_SIGNS = re.compile("|".join((
    r"\bout of memory\b",  # torch's allocator; CUDA and HIP errors and driver errors, pinned memory among them; Triton;
    #                        NCCL (Cuda failure 'out of memory'); MPS and XPU
    r"\bCUDA_ERROR_OUT_OF_MEMORY\b", r"\bcudaErrorMemoryAllocation\b", r"\bhipErrorOutOfMemory\b",
    r"\bOUT_OF_(DEVICE|HOST)_MEMORY\b",  # XPU's runtime
    r"\b(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(STATUS_)?ALLOC_FAILED\b", r"\bHIPBLAS_STATUS_ALLOC_FAILED\b",
    r"\bCUDNN_STATUS_INTERNAL_ERROR_(HOST|DEVICE)_ALLOCATION_FAILED\b",  # cuDNN 9
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",  # cuBLAS, when it starts on a full card
    r"cuDNN error: CUDNN_STATUS_NOT_SUPPORTED\.",  # for want of a workspace
    r"\bFailed to CUDA (host )?(calloc|malloc|alloc)\b",  # NCCL
    r"DefaultCPUAllocator: (can't allocate|not enough) memory",
    r"\bcannot allocate memory\b", r"\bcan't allocate memory\b", r"\bstd::bad_alloc\b",  # the C library's and C++'s
)), re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or one that it was raised from, says that an allocation failed, on an accelerator or on the
    CPU."""
    while not isinstance(error, UserError):  # it explains it already, or is about something else
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's: it may be absent
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, RuntimeError) and _SIGNS.search(str(error)):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return False


@contextmanager
def explained(what: str, advice: str = SMALLER) -> Iterator[None]:
    """Within the block, running out of memory becomes a UserError that says `what` was going on ("while loading the
    model", "in this conversation") and gives `advice`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"out of memory {what}; {advice}") from error
