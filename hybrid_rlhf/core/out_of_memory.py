"""Detect out-of-memory errors and report them in one line."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_rlhf.core.errors import UserError

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
