"""Repartition trained weights that several processes saved in parts, for the processes that go on with them.

At ZeRO 0 every process has full parameters, the same ones. At ZeRO 1 and 2 a group of parameters is one flat row of
numbers, cut into as many equal parts as there are processes; at ZeRO 3 each parameter is cut by itself, and a part is
the pieces of a group, one after the other. The row or each parameter is padded at its end to divide evenly. So each
number of a parameter has one place in any layout, and only a process's own part is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PROCESSES = "processes"  # in a state: those that several processes saved, in the order of their ranks


class Partition(NamedTuple):
    """How processes share trained weights: the ZeRO stage, and from stage 1 on the parameters of each group, in the
    order in which they lie."""

    stage: int
    groups: list[list[str]]

    @staticmethod
    def read(saved: Mapping) -> Partition:
        """From `state`."""
        return Partition(int(saved["stage"]), [list(group) for group in saved["groups"]])

    def state(self) -> dict:
        """For a checkpoint."""
        return {"stage": self.stage, "groups": self.groups}


class Span(NamedTuple):
    """The numbers begin..end of a parameter, flat, which lie in tensor `part` of process `rank` from `offset` on."""

    name: str
    begin: int
    end: int
    rank: int
    part: str
    offset: int


def spans(partition: Partition, sizes: Mapping[str, int], world: int, lengths: Mapping[str, int]) -> list[Span]:
    """Where all numbers lie. sizes: of the parameters; lengths: of each process's part of a group, by "group i".

    Raises ValueError where these lengths do not fit these parameters.
    """
    if partition.stage == 0:
        return [Span(name, 0, size, 0, name, 0) for name, size in sizes.items()]
    if sorted(name for group in partition.groups for name in group) != sorted(sizes):
        raise ValueError("the checkpoint is of other weights than those that are trained here")
    result: list[Span] = []
    for i, group in enumerate(partition.groups):
        part, group_sizes = f"group {i}", {name: sizes[name] for name in group}
        result += (_pieces if partition.stage == 3 else _row)(group_sizes, part, lengths[part], world)
    return result


def _row(sizes: Mapping[str, int], part: str, length: int, world: int) -> Iterator[Span]:
    """ZeRO 1 and 2: parameter after parameter, cut every `length` numbers."""
    _check(0 <= world * length - sum(sizes.values()) < 2 * world, part, length, world)  # padded to even parts
    start = 0
    for name, size in sizes.items():
        for rank in range(start // length, (start + size - 1) // length + 1):
            begin, end = max(start, rank * length), min(start + size, (rank + 1) * length)
            yield Span(name, begin - start, end - start, rank, part, begin - rank * length)
        start += size


def _pieces(sizes: Mapping[str, int], part: str, length: int, world: int) -> Iterator[Span]:
    """ZeRO 3: a piece of each parameter."""
    _check(length == sum(-(-size // world) for size in sizes.values()), part, length, world)
    offset = 0
    for name, size in sizes.items():
        piece = -(-size // world)
        for rank in range(world):
            if rank * piece < size:
                yield Span(name, rank * piece, min(size, (rank + 1) * piece), rank, part, offset)
        offset += piece


def _check(is_right: bool, part: str, length: int, world: int) -> None:
    if not is_right:
        raise ValueError(f"{world} processes with {length} numbers each of {part} do not have the weights that are "
                         "trained here")


class Regrouped:
    """Tensors for one of the processes that go on, from the parts that other processes saved.

    saved: where all numbers lie among the processes that saved; wanted: where this process's are to lie.
    """

    def __init__(self, saved: Sequence[Span], wanted: Sequence[Span]) -> None:
        self._saved: dict[str, list[Span]] = {}
        for span in saved:
            self._saved.setdefault(span.name, []).append(span)
        self._wanted: dict[str, list[Span]] = {}
        for span in wanted:
            self._wanted.setdefault(span.part, []).append(span)

    def sources(self, part: str) -> list[tuple[int, str]]:
        """(rank, its part) that hold numbers of this process's `part`; empty where it is padding only."""
        return list(dict.fromkeys((old.rank, old.part) for old, _, _, _ in self._overlaps(part)))

    def tensor(self, part: str, length: int, find: Callable[[int, str], Tensor | None]) -> Tensor:
        """This process's `part` of `length` numbers, flat, fp32, on the CPU. find: (rank, its part) -> the tensor that
        it saved, of which only what is needed is read; None stands for zeros."""
        target, opened = torch.zeros(length), {source: find(*source) for source in self.sources(part)}
        for old, begin, end, place in self._overlaps(part):
            tensor = opened[old.rank, old.part]
            if tensor is not None:
                flat, start = tensor.reshape(-1), old.offset + begin - old.begin
                target[place:place + end - begin] = flat[start:start + end - begin]
        return target

    def _overlaps(self, part: str) -> Iterator[tuple[Span, int, int, int]]:
        """(where it was saved, first and last + 1 number of the parameter, where it goes)"""
        for new in self._wanted.get(part, ()):
            for old in self._saved[new.name]:
                begin, end = max(old.begin, new.begin), min(old.end, new.end)
                if begin < end:
                    yield old, begin, end, new.offset + begin - new.begin
