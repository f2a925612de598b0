"""The memory of a card as torch's caching allocator hands it out: blocks within segments that stay reserved.

After c10/cuda/CUDACachingAllocator.cpp (torch 2.13): sizes are rounded to 512 bytes; up to 1 MiB comes from segments of
2 MiB, up to 10 MiB from segments of 20 MiB, more from segments of its own size rounded to 2 MiB; the smallest free
block that is large enough is taken and split; freed neighbours become one. Where the card is full, segments without a
block in use go back to it first, but not during a capture: then the allocation fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIB = 1 << 20
SMALL, LARGE_SEGMENT = MIB, 20 * MIB


class Block:
    """A piece of a segment. asked: bytes that the program asked for; 0 while the block is free."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size, self.asked = segment, size, 0


class Segment:
    """What the driver gave at once. pool: whose blocks it holds; None is the pool of all that is not captured."""

    def __init__(self, size: int, pool: object, is_small: bool) -> None:
        self.size, self.pool, self.is_small = size, pool, is_small
        self.blocks = [Block(self, size)]

    def is_unused(self) -> bool:
        return not any(block.asked for block in self.blocks)


class Allocator:
    """total: bytes of the card. taken: what the context and other programs hold of it. fail_at: the number of an
    allocation (from 1) that fails as if the card were full; None for none. count: allocations so far."""

    def __init__(self, total: int, taken: int = 0) -> None:
        self.total, self.taken = total, taken
        self.count, self.fail_at = 0, None
        self.allocated = self.peak = 0  # bytes in blocks in use
        self.segments: list[Segment] = []
        self.pool: object = None  # where allocations go while a graph is captured

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def free(self) -> int:
        return self.total - self.taken - self.reserved

    def take(self, num_bytes: int) -> Block | None:
        """A block for `num_bytes`; None for no bytes. Raises torch.OutOfMemoryError."""
        if num_bytes == 0:
            return None
        self.count += 1
        size = -(-num_bytes // 512) * 512
        block = None if self.count == self.fail_at else self._found(size) or self._new(size)
        if block is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {num_bytes / MIB:.2f} MiB. GPU 0 has a total capacity of "
                f"{self.total / MIB:.2f} MiB of which {self.free / MIB:.2f} MiB is free.")
        self._split(block, size)
        block.asked = num_bytes
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def give_back(self, block: Block) -> None:
        self.allocated -= block.size
        block.asked = 0
        blocks = block.segment.blocks
        at = blocks.index(block)
        for other in (blocks[i] for i in (at + 1, at - 1) if 0 <= i < len(blocks)):
            if not other.asked:
                block.size += other.size
                blocks.remove(other)

    @contextmanager
    def beside(self, num_bytes: int) -> Iterator[None]:
        """Within the block an operation holds a buffer."""
        block = self.take(num_bytes)
        try:
            yield
        finally:
            if block is not None:
                self.give_back(block)

    def release(self) -> None:
        """torch.cuda.empty_cache: segments without a block in use go back to the card."""
        self.segments = [s for s in self.segments if s.pool is not None or not s.is_unused()]

    def end_pool(self, pool: object) -> None:
        """The last graph of a pool is gone: what it reserved may go back to the card."""
        for segment in self.segments:
            if segment.pool is pool:
                segment.pool = None

    @contextmanager
    def capturing(self, pool: object) -> Iterator[None]:
        before, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = before

    def _found(self, size: int) -> Block | None:
        fitting = (block for segment in self.segments
                   if segment.pool is self.pool and segment.is_small == (size <= SMALL)
                   for block in segment.blocks if not block.asked and block.size >= size)
        return min(fitting, key=lambda block: block.size, default=None)

    def _new(self, size: int) -> Block | None:
        wanted = 2 * MIB if size <= SMALL else LARGE_SEGMENT if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if wanted > self.free and self.pool is None:
            self.release()
        if wanted > self.free:
            return None
        segment = Segment(wanted, self.pool, size <= SMALL)
        self.segments.append(segment)
        return segment.blocks[0]

    @staticmethod
    def _split(block: Block, size: int) -> None:
        rest = block.size - size
        if rest >= 512 if block.segment.is_small else rest > SMALL:
            block.size = size
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, Block(block.segment, rest))
