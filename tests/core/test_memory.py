"""Running out of memory is recognised by what each part below says, and nothing else is taken for it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from hybrid_rlhf import cli
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.memory import NUM_PRODUCTS, PRODUCT_CACHES, explained, is_out_of_memory

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


# -- what oneDNN keeps of the products that it compiles is bounded from the start -------------------------------------


# Of a process as torch has it, and of one whose caches the entry point bounds: resident MiB after 200 and after 500
# products of different lengths. Forked, so that torch is imported once.
CHILD = """
import os
import random
import torch
from hybrid_rlhf.cli import main
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) // 1024
def grow():
    weight, lengths = torch.ones(64, 192), list(range(1, 501))
    random.Random(0).shuffle(lengths)
    with torch.no_grad():
        for i, rows in enumerate(lengths, 1):
            torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 192), weight, None, "none", [], "")
            if i in (200, 500):
                print("MiB", resident(), flush=True)
if os.fork() == 0:
    grow()
else:
    os.wait()
    main(["--version"])
    grow()
"""


@pytest.mark.skipif(not (sys.platform.startswith("linux") and torch.backends.mkldnn.is_available()),
                    reason="reads /proc, and multiplies by oneDNN")
def test_products_of_ever_new_lengths_do_not_fill_the_memory() -> None:
    free = {name: value for name, value in os.environ.items() if name not in PRODUCT_CACHES}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=free)
    early, late, bounded_early, bounded_late = (
        int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("MiB"))
    assert late - early >= 20  # torch's own: up to 1,024 products in each of two caches
    assert bounded_late - bounded_early <= 5


def test_the_entry_point_bounds_both_caches_unless_the_user_did(monkeypatch, capsys) -> None:
    first, second = PRODUCT_CACHES
    monkeypatch.setenv(first, "7")
    monkeypatch.setenv(second, "")  # so that it is restored afterwards
    monkeypatch.delenv(second)
    cli.main(["--version"])
    assert (os.environ[first], os.environ[second]) == ("7", str(NUM_PRODUCTS))
    assert capsys.readouterr().out.startswith("hybrid-rlhf ")
