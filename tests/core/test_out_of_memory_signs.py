"""Running out of memory is recognised by what each part below says, and nothing else is taken for it."""

import errno

import pytest
import torch

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.memory import explained, is_out_of_memory

# What was seen of torch 2.11 to 2.13, Triton 3, NCCL 2 and cuDNN 9, line for line.
SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.78 GiB."),
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5\n"
                 "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("NCCL error in: x.cpp:1, unhandled system error\nLast error:\nFailed to CUDA host alloc 83886 bytes"),
    RuntimeError("MPS backend out of memory (MPS allocated: 5.00 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000 bytes."),
    RuntimeError("unable to mmap 5368709120 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]
OTHER = [
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."),  # a kernel's own size
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("Expected all tensors to be on the same device"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("this text is about being out of memory"),
    UserError("out of memory in the actor's update: ..."),  # explained already
]


def caused_by(inner: Exception, outer: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize("error", SHORT, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_an_allocation_that_failed_is_known_by_its_message(error):
    assert is_out_of_memory(error)
    assert is_out_of_memory(caused_by(error, RuntimeError("a library says: something went wrong")))
    with pytest.raises(UserError, match=r"^out of memory while loading the model; .*--preset.*--plan"), \
            explained("while loading the model"):
        raise error


@pytest.mark.parametrize("error", OTHER, ids=lambda e: f"{type(e).__name__}-{str(e)[:40]}")
def test_nothing_else_is_taken_for_it(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)) as caught, explained("while loading the model"):
        raise error
    assert caught.value is error


def test_what_the_allocators_of_this_machine_say_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as caught:
        bytearray(2**60)
    assert is_out_of_memory(caught.value)


def test_an_error_that_was_explained_is_not_explained_again():
    with pytest.raises(UserError, match=r"^out of memory while scoring; shorter"), explained("in a step"), \
            explained("while scoring", "shorter"):
        raise MemoryError
