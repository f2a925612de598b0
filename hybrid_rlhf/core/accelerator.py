"""The device of a process, and a bound on its memory where the system sets none."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hybrid_rlhf.core.distributed import device, world_size
from hybrid_rlhf.core.memory import CONFIGURED_BY, is_wsl

WSL_SHARE = 0.95  # of what is free at start
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))  # NVIDIA's on Linux, on WSL2


def keep_within_card() -> int | None:
    """On WSL2, bound the memory of the card that torch takes; returns the bytes, or None where nothing was set.

    A program that asks for more than the card has gets the computer's memory from Windows' driver, over the bus: no
    error, but everything is many times slower. With a bound torch's allocator fails instead, and smaller micro-batches,
    fewer slots or an error message follow as on Linux. The bound is 95% of what is free now: the rest is for code that
    libraries load later, which torch does not count, and for Windows' desktop. The user's own bound
    (per_process_memory_fraction in torch's variable) stays.
    """
    place = device()
    is_set = any("per_process_memory_fraction" in os.environ.get(name, "") for name in CONFIGURED_BY)
    if place.type != "cuda" or is_set or not is_wsl():
        return None
    free, total = torch.cuda.mem_get_info(place)
    unused = torch.cuda.memory_reserved(place)  # ours already, where this process has computed before
    bound = int(WSL_SHARE * free) + unused
    torch.cuda.set_per_process_memory_fraction(min(1.0, bound / total), place)
    return bound


def device_line() -> str:
    """The device line of a run's header: what it computes on and, where that is the CPU, why not on something else."""
    place = device()
    if place.type == "cpu":
        return f"device: the CPU; {why_no_card()}"
    total = torch.cuda.get_device_properties(place).total_memory / 2**30
    more = ["by ROCm, on which this has not been tried"] if torch.version.hip else []
    others = torch.cuda.device_count() - world_size()
    if others > 0:
        more.append(f"{others} more here, for torchrun --nproc_per_node {others + world_size()}")
    if is_wsl():
        bound = torch.cuda.get_per_process_memory_fraction(place) * total
        more.append(f"WSL2: at most {bound:.1f} GiB of it, for beyond what is free Windows lends memory of its own")
    return "; ".join([f"device: {place}, {torch.cuda.get_device_name(place)}, {total:.1f} GiB", *more])


def why_no_card() -> str:
    """Why this process computes on the CPU."""
    named = f"torch {torch.__version__}"
    if torch.version.cuda or torch.version.hip:
        kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and not hidden.strip(" -1"):
            return f"CUDA_VISIBLE_DEVICES={hidden} hides the cards"
        return f"{named} is built for {kind} and finds no card (nvidia-smi or rocm-smi says what the driver sees)"
    if torch.backends.mps.is_available():
        return "the GPU of this Mac (MPS) is not supported: the kernels and the training of cards are for CUDA"
    if torch.xpu.is_available():
        return "the Intel GPU (XPU) is not supported: the kernels and the training of cards are for CUDA"
    if any(path.exists() for path in _DRIVERS):
        return (f"{named} is built without CUDA, and there is an NVIDIA driver: pip install torch --index-url "
                "https://download.pytorch.org/whl/cu130")
    return f"{named} is built without CUDA"
