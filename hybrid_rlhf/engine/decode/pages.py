"""Which pages of a cache hold each slot's columns, as in PagedAttention (2309.06180).

A slot has pages for the columns that it holds, not for its capacity, and the whole pages of a prompt are shared by all
slots that begin with it. So several times as many sequences run at once as slots of full length would fit.
"""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from hybrid_rlhf.kernels.ops import PAGE_COLUMNS

# Sequences decoded at once, as many as whole slots are held for; and on a card, whose slots share the pages of those.
NUM_WHOLE, NUM_PAGED = 64, 256
SIZES = {"cuda": PAGE_COLUMNS}  # columns of a page
_SIZE = 64  # elsewhere


def page_size(device: torch.device) -> int:
    return SIZES.get(device.type, _SIZE)


class Pages:
    """The pages of `num_slots` slots of at most `per_slot` pages each, out of `num_pages` (at least `per_slot`).

    table (num_slots, per_slot) int64, on `device` and at one address: slot -> its pages, in order; behind them the
    spare page, number num_pages, of which nothing is read. Pages are numbered from 0, and free ones are used again
    first. Idle rows need no column of their own: a slot's last one is that of a token that no step reads.
    """

    def __init__(self, num_slots: int, per_slot: int, num_pages: int, size: int, device: torch.device) -> None:
        self.size, self.num_pages = size, num_pages
        self.table = torch.full((num_slots, per_slot), num_pages, device=device)
        self.most_used = 0
        self._of: list[list[int]] = [[] for _ in range(num_slots)]
        self._free, self._users = list(range(num_pages))[::-1], [0] * num_pages
        self._changed: set[int] = set()

    def reset(self) -> None:
        """Take all pages from the slots."""
        for slot in range(len(self._of)):
            self.cut(slot, 0)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def count(self, columns: int) -> int:
        """Pages of so many columns."""
        return -(-columns // self.size)

    def held(self, slot: int) -> int:
        """Columns for which the slot has pages."""
        return len(self._of[slot]) * self.size

    def grow(self, slot: int, columns: int) -> bool:
        """Give the slot pages for `columns` columns; False, and nothing given, where too few are free."""
        missing = self.count(columns) - len(self._of[slot])
        if missing > len(self._free):
            return False
        for _ in range(missing):
            self._of[slot].append(self._free.pop())
            self._users[self._of[slot][-1]] = 1
        if missing > 0:
            self._changed.add(slot)
            self.most_used = max(self.most_used, self.num_pages - len(self._free))
        return True

    def cut(self, slot: int, columns: int) -> None:
        """Give back the slot's pages behind those of its first `columns` columns."""
        keep = self.count(columns)
        for page in self._of[slot][keep:]:
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)
            self._changed.add(slot)
        del self._of[slot][keep:]

    def share(self, source: int, target: int, columns: int) -> int:
        """Put the whole pages of the first `columns` columns of one slot into another, in place of its own; returns
        their number of columns."""
        whole = self._of[source][: columns // self.size]
        for page in whole:
            self._users[page] += 1
        self.cut(target, 0)
        self._of[target] += whole
        self._changed.add(target)
        return len(whole) * self.size

    def sync(self) -> None:
        """Bring the table up to date."""
        if not self._changed:
            return
        slots, width = sorted(self._changed), self.table.shape[1]
        rows = [[*self._of[slot], *[self.num_pages] * (width - len(self._of[slot]))] for slot in slots]
        self.table[torch.tensor(slots, device=self.table.device)] = torch.tensor(rows, device=self.table.device)
        self._changed.clear()

    def page_of(self, slot: int, column: int) -> int:
        return self._of[slot][column // self.size]


def lazy_zeros(size: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of `like`'s dtype and device; on a CPU their memory is taken as they are first written."""
    num_bytes = prod(size) * like.element_size()
    if like.device.type != "cpu" or not num_bytes:
        return like.new_zeros(size)
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).view(size)
