"""The processes of a run: rank, world size, collectives. Works unchanged with one process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid_rlhf.core.accelerator import check_kernels, device

# Timeout of collectives: the first process may tokenise, or wait for a judge, for hours, where NCCL would end the run
# after ten minutes. The thread of core/failure.py notices processes that have died, failed or fallen silent.
PATIENCE = timedelta(hours=12)


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


_main = 0  # the rank of the main process, as this one knows it


def is_main() -> bool:
    """True in the one process that writes files and prints to the terminal."""
    return rank() == _main


def print_main(*lines: str) -> None:
    """Print lines to stderr, in the main process alone."""
    if is_main():
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def stand_in_for_main() -> None:
    """Make this process the main one from now on: rank 0 has died, and another process must report that."""
    global _main
    _main = rank()


def init_process_group() -> None:
    """Join the processes that a launcher started, or be a group of one. Does nothing the second time.

    Raises UserError for a card that this build of torch has no kernels for.
    """
    if is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        check_kernels(device())
        torch.cuda.set_device(device())
    if {"RANK", "MASTER_ADDR"} <= os.environ.keys():  # accelerate sets RANK alone in a single process
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A group of these processes, with the timeout of the default group (torch would take NCCL's). All processes call
    it."""
    return dist.new_group(list(ranks), timeout=PATIENCE)


def _carrier() -> torch.device:
    """The device of tensors in collectives: NCCL takes none on the CPU."""
    return device() if dist.get_backend() == "nccl" else torch.device("cpu")


_instead: Callable[[Tensor, Callable[[], object]], None] | None = None


@contextmanager
def sums_through(instead: Callable[[Tensor, Callable[[], object]], None]) -> Iterator[None]:
    """Within the block sums and maxima over processes are left to instead(tensor, make): make() replaces this process's
    tensor by the result over all."""
    global _instead
    _instead = instead
    try:
        yield
    finally:
        _instead = None


def _all_reduce(tensor: Tensor, kind: dist.ReduceOp.RedOpType) -> None:
    make = partial(dist.all_reduce, tensor, kind)
    _instead(tensor, make) if _instead else make()


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes, on the tensor's device (a new one; the argument keeps its value)."""
    if world_size() == 1:
        return value
    total = value.detach().to(_carrier(), copy=True)
    _all_reduce(total, dist.ReduceOp.SUM)
    return total.to(value.device)


def mean_over_ranks(mean: float, count: int) -> tuple[float, int]:
    """The mean over the observations of all processes (this one has `count`), and their number."""
    total, number = sum_over_ranks(torch.tensor([mean * count, count], dtype=torch.float64)).tolist()
    return total / max(number, 1), int(number)


def max_over_ranks(value: int) -> int:
    """The largest of all processes' integers."""
    if world_size() == 1:
        return value
    largest = torch.tensor(value, device=_carrier())
    _all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def gather_over_ranks(value: object) -> list:
    """Every process's `value` (any JSON value; numbers keep all their bits), in the order of ranks."""
    if world_size() == 1:
        return [value]
    return _exchanged(value, world_size(), _carrier(), dist.all_gather)


def _exchanged(message: object, count: int, carrier: torch.device, all_gather: Callable) -> list:
    """The messages (JSON values) of `count` processes, in their order."""
    text = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(carrier)
    sizes = [torch.zeros(1, dtype=torch.long, device=carrier) for _ in range(count)]
    all_gather(sizes, torch.tensor([len(text)], device=carrier))
    longest = max(map(int, sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8, device=carrier) for _ in range(count)]
    all_gather(texts, nn.functional.pad(text, (0, longest - len(text))))
    return [json.loads(t[: int(n)].cpu().numpy().tobytes()) for t, n in zip(texts, sizes, strict=True)]


def joined_over_ranks(part: Tensor) -> Tensor:
    """The parts (n,) of all processes concatenated in the order of ranks, on the part's device; bit for bit."""
    joined = torch.empty(world_size() * part.numel(), dtype=part.dtype, device=part.device)
    dist.all_gather_into_tensor(joined.view(torch.uint8), part.contiguous().view(torch.uint8))
    return joined


def place_over_ranks(count: int) -> tuple[int, int]:
    """(number of this process's first item, number of all items) when each process holds `count` of a common list."""
    counts = gather_over_ranks(int(count))
    return sum(counts[: rank()]), sum(counts)


def barrier() -> None:
    if is_initialized() and world_size() > 1:  # in a world of one NCCL would only take memory of the card
        dist.barrier()


@contextmanager
def main_first() -> Iterator[None]:
    """The block runs in each machine's first process, then in its others, which find the first one's files."""
    is_first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    if not is_first:
        barrier()
    yield
    if is_first:
        barrier()


def shutdown() -> None:
    """Leave the process group in step with the others; without it ranks can abort at exit."""
    if is_initialized():
        barrier()
        dist.destroy_process_group()


def consecutive_ranks(degree: int) -> RankGroup:
    """The group of `degree` consecutive ranks that this process belongs to. Every process of the world calls this.

    Raises ValueError where the world's size is not a multiple of degree.
    """
    if world_size() % degree:
        raise ValueError(f"groups of {degree} ranks in a world of {world_size()}")
    groups = [new_group(range(first, first + degree)) for first in range(0, world_size(), degree)]
    return RankGroup(groups[rank() // degree])


class RankGroup:
    """Some ranks that compute together. degree: how many; rank: which of them this process is.

    A collective that another rank has left raises RuntimeError, and so does every later one.
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
        """Every rank's message (a JSON value), in order of rank."""
        return _exchanged(message, self.degree, self._device, partial(self._together, dist.all_gather))

    def abandon(self) -> None:
        """Leave for good: ranks that wait for this one raise instead of waiting for ever (with gloo at once, with NCCL
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
