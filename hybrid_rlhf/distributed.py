"""What a process knows about the others: rank, world size, sums. Works unchanged with one process."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """True in the one process that writes files and talks to the terminal."""
    return rank() == 0


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes (a new tensor; the argument keeps its value)."""
    if world_size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def barrier() -> None:
    if is_initialized():
        dist.barrier()


def shutdown() -> None:
    """Leave the process group in step with the others; without it ranks can abort at exit."""
    if is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")
