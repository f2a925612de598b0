"""The C++ kernels of the CPU: the operations of kernels/reference.py, compiled on first use."""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from types import ModuleType

import torch

from hybrid_rlhf.kernels import build
from hybrid_rlhf.kernels.gradients import causal_attention_by, fused_by, token_scores_by
from hybrid_rlhf.kernels.ops import Ops, Updates

_log = logging.getLogger(__name__)
_HERE, _NAME = Path(__file__).parent, "hybrid_rlhf_cpu"
SOURCES = tuple(_HERE / name for name in (
    "attention.cpp", "sequences.cpp", "sampling.cpp", "linear.cpp", "packed.cpp", "dots.cpp", "tiles.cpp",
    "elementwise.cpp", "decode_layer.cpp", "vocabulary.cpp", "updates.cpp",
    "bindings.cpp"))  # the only one with torch's headers, which take 24 s of the compiler's time
HEADERS = tuple(_HERE / name for name in ("simd.h", "kernels.h", "products.h"))


def load() -> Ops:
    """The compiled operations. Raises KernelsUnavailableError where they cannot be built or loaded.

    Tensors are fp32, bf16 or fp16 on the CPU; sums are in fp32. Threads are torch's own (torch.set_num_threads).
    """
    ours = module()
    dtypes = own_dtypes(ours.has_bf16_dots())
    names = ", ".join(str(d).removeprefix("torch.") for d in sorted(dtypes, key=str)) + " and AMX" * has_tiles(ours)
    ops = Ops(f"cpu (C++, with products in {names})" if dtypes else "cpu (C++)", ours.decode_attention, ours.sample,
              fused=fused_by(ours), causal_attention=causal_attention_by(ours) if has_wide_vectors() else None,
              token_scores=token_scores_by(ours), updates=Updates(ours.adamw, ours.sum_of_squares))
    return ops._replace(linear=ours.linear, linear_dtypes=dtypes, adapted_linear=ours.adapted_linear,
                        decode_layer=ours.DecodeLayer) if dtypes else ops


def has_tiles(ours: ModuleType) -> bool:
    """Whether products in bf16 use the processor's matrix unit. The system may refuse it to this process, which is a
    warning, because other instructions round these products otherwise."""
    if ours.compiled_with_tiles() and not ours.has_tiles():
        _log.warning("the system lets this process not use the processor's matrix unit (AMX): products in bfloat16 are "
                     "slower, and rounded otherwise than in a process that may")
    return ours.has_tiles()


def module() -> ModuleType:
    """The compiled module, whether or not `load` would use all of it on this processor."""
    return build.load_extension(_NAME, SOURCES, HEADERS)


def can_load() -> bool:
    """Whether `load` would find or compile the operations, as far as can be known without doing so."""
    return build.can_load(_NAME, SOURCES, HEADERS)


def is_built() -> bool:
    """Whether `load` would compile nothing."""
    return build.is_built(_NAME, SOURCES, HEADERS)


def has_wide_vectors() -> bool:
    """Whether a vector register holds 512 bits, for which the attention of short prompts is written."""
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def own_dtypes(has_bf16_dots: bool) -> frozenset[torch.dtype]:
    """The dtypes in which matrix products are ours, because torch's are slower. Fixed by rule, not by a trial, so that
    every run on a machine rounds alike. Measured, milliseconds by torch and by us:

    x86 without AVX-512, 16 bits, where torch multiplies row by row: 16 rows by 2048 x 768, one core: 4.9 and 0.85.
    AVX-512 BF16, bf16, few rows: 16 rows by 2016 x 768, two cores: 0.159 and 0.107.
    With Intel AMX as well: 8, 16 and 32 rows by 768 x 32000, one core: 3.8, 4.1, 4.2 and 2.5, 2.7, 3.0.
    AVX-512, fp32, few rows: 16 rows by 768 x 2048, two cores (Intel): 0.319 and 0.235; more rows are torch's on Intel.
    AMD with AVX-512, fp32, many rows, where torch's library (MKL) is slow: 2048 rows by 2016 x 768: 30 and 13.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return frozenset()
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return frozenset({torch.bfloat16, torch.float16})
    return frozenset([torch.float32] + [torch.bfloat16] * has_bf16_dots)
