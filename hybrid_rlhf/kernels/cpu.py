"""The C++ kernels of the processor: the operations of kernels/reference.py, compiled on first use."""

from __future__ import annotations

from pathlib import Path

from hybrid_rlhf.kernels.build import load_extension
from hybrid_rlhf.kernels.ops import Ops

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("attention.cpp", "sampling.cpp", "bindings.cpp"))
HEADERS = tuple(_HERE / name for name in ("simd.h", "kernels.h", "truncation.h"))


def load() -> Ops:
    """The compiled operations; raises KernelsUnavailableError where they cannot be had.

    Tensors are fp32, bf16 or fp16 on the processor; sums are in fp32. Threads are torch's own (torch.set_num_threads).
    """
    module = load_extension("hybrid_rlhf_cpu", SOURCES, HEADERS)
    return Ops("cpu (C++)", module.decode_attention, module.sample)
