"""The C++ kernels of the processor: the operations of kernels/reference.py, compiled on first use."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from hybrid_rlhf.kernels.build import load_extension
from hybrid_rlhf.kernels.ops import Ops

_HERE = Path(__file__).parent
SOURCES = tuple(_HERE / name for name in ("attention.cpp", "sampling.cpp", "linear.cpp", "bindings.cpp"))
HEADERS = tuple(_HERE / name for name in ("simd.h", "kernels.h", "truncation.h"))


def load() -> Ops:
    """The compiled operations; raises KernelsUnavailableError where they cannot be had.

    Tensors are fp32, bf16 or fp16 on the processor; sums are in fp32. Threads are torch's own (torch.set_num_threads).
    """
    module, own = _module(), multiplies_itself()
    return Ops("cpu (C++, with 16-bit products)" if own else "cpu (C++)", module.decode_attention, module.sample,
               module.linear if own else None)


def load_linear() -> Callable:
    """The compiled linear(input, weight, bias), whether or not `load` would use it on this processor."""
    return _module().linear


def _module() -> ModuleType:
    return load_extension("hybrid_rlhf_cpu", SOURCES, HEADERS)


def multiplies_itself() -> bool:
    """Whether 16-bit matrix products are ours too: on x86 without AVX-512, where torch multiplies row by row (measured
    on one AVX2 core, bf16, 16 rows by 2048 x 768: torch 4.9 ms, ours 0.85 ms; 2048 rows: 660 and 75 ms).
    """
    return (platform.machine().lower() in ("x86_64", "amd64")
            and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"))
