"""What a process knows about the others: rank, world size, sums. Works unchanged with one process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


def consecutive_ranks(degree: int) -> RankGroup:
    """The group of `degree` consecutive ranks that this process belongs to. Every process of the world calls this.

    Raises ValueError where the world's size is no multiple of degree.
    """
    if world_size() % degree:
        raise ValueError(f"groups of {degree} ranks in a world of {world_size()}")
    groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, world_size(), degree)]
    return RankGroup(groups[rank() // degree])


class RankGroup:
    """Some ranks that work on one thing together. degree: how many; rank: which of them this process is.

    A collective of which another rank has gone raises RuntimeError, and so does every later one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: dist.ProcessGroup | None = group
        self.degree, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self._device = device() if dist.get_backend(group) == "nccl" else torch.device("cpu")

    def part(self, size: int) -> slice:
        """This rank's share of `size` rows; shares differ by one where the degree does not divide."""
        return self._part(self.rank, size)

    def _part(self, rank: int, size: int) -> slice:
        return slice(size * rank // self.degree, size * (rank + 1) // self.degree)

    def sum(self, share: Tensor) -> Tensor:
        """The sum over the ranks, the same bits on each of them. The argument may be overwritten."""
        share = share.contiguous()
        self._together(dist.all_reduce, share)
        return share

    def gather(self, share: Tensor, size: int) -> Tensor:
        """(..., this rank's part of `size`) of every rank -> (..., size)."""
        widest = -(-size // self.degree)
        padded = nn.functional.pad(share, (0, widest - share.shape[-1])).contiguous()
        shares = [torch.empty_like(padded) for _ in range(self.degree)]
        self._together(dist.all_gather, shares, padded)
        parts = [self._part(i, size) for i in range(self.degree)]
        return torch.cat([s[..., : p.stop - p.start] for s, p in zip(shares, parts, strict=True)], -1)

    def firsts(self, value: Tensor) -> Tensor:
        """The first rank's tensor, on all of them. The argument may be overwritten."""
        value = value.contiguous()
        self._together(partial(dist.broadcast, group_src=0), value)
        return value

    def exchange(self, message: object) -> list:
        """Every rank's message (what JSON can say), in order of rank."""
        text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self._device)
        sizes = [torch.zeros(1, dtype=torch.long, device=self._device) for _ in range(self.degree)]
        self._together(dist.all_gather, sizes, torch.tensor([len(text)], device=self._device))
        widest = max(map(int, sizes))
        texts = [torch.zeros(widest, dtype=torch.uint8, device=self._device) for _ in range(self.degree)]
        self._together(dist.all_gather, texts, nn.functional.pad(text, (0, widest - len(text))))
        return [json.loads(t[: int(n)].cpu().numpy().tobytes()) for t, n in zip(texts, sizes, strict=True)]

    def abandon(self) -> None:
        """Leave for good: whoever waits for this rank raises instead of waiting for ever (with gloo at once, with NCCL
        when its watchdog finds out)."""
        group, self.group = self.group, None
        if group is not None:
            dist.destroy_process_group(group)

    def _together(self, collective: Callable, *tensors: object) -> None:
        if self.group is None:
            raise RuntimeError("the group of ranks ended with an earlier error; start the run again")
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(f"another rank of the group has failed or left ({error})") from error
