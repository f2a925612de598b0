"""The Triton kernels of NVIDIA cards: the operations of kernels/reference.py, compiled by Triton on first use."""

from __future__ import annotations

import torch

from hybrid_rlhf.kernels import launcher
from hybrid_rlhf.kernels.gradients import fused_by
from hybrid_rlhf.kernels.ops import KernelsUnavailableError, Ops


def load() -> Ops:
    """The operations in Triton; raises KernelsUnavailableError where Triton is not installed, or cannot launch a first
    kernel on the card that is here.

    Tensors are fp32, bf16 or fp16 on one card; sums are in fp32. Nothing waits for the device, so all of it may be
    captured into a CUDA graph after one uncaptured run (which compiles).
    """
    try:
        from hybrid_rlhf.kernels import triton_attention, triton_fused, triton_sampling
    except ImportError as error:
        raise KernelsUnavailableError(f"Triton is not installed: {error}; pip install triton") from error
    if torch.cuda.is_available() and (reason := launcher.why_no_launch()):
        raise KernelsUnavailableError(f"Triton cannot launch kernels here: {reason}")
    return Ops("cuda (Triton)", triton_attention.decode_attention, triton_sampling.sample, fused=fused_by(triton_fused))
