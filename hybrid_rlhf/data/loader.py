"""Batches in an order that is a function of (seed, epoch), from any position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data import row_file

Batch = TypeVar("Batch")


class Loader(Generic[Batch]):
    """Endless batches of `rows`, and single ordered passes.

    batch_size: rows per batch and process. Every process cuts its own part out of one global batch of
    batch_size * world rows, so the order of the data does not depend on the number of processes as long as
    batch_size * world does not. collate: a list of rows -> a batch. drop_last: whether the rest of an epoch that
    fills no global batch is skipped; None skips it unless the epoch would then be empty. A batch that is not full is
    filled up from the beginning of the epoch where there are several processes, so that each has rows.
    """

    def __init__(self, rows: Sequence[dict], batch_size: int, collate: Callable[[list[dict]], Batch], seed: int, *,
                 rank: int = 0, world: int = 1, shuffle: bool = True, drop_last: bool | None = None) -> None:
        check(batch_size >= 1, f"the batch size is {batch_size}; it must be at least 1")
        check(len(rows) > 0, "there are no rows to load")
        self.rows, self.batch_size, self.collate, self.seed = rows, batch_size, collate, seed
        self.rank, self.world, self.shuffle = rank, world, shuffle
        self.drop_last = len(rows) >= batch_size * world if drop_last is None else drop_last
        self._shuffled: tuple[int | None, list[int]] = (None, [])
        self._fingerprint: str | None = None
        self.epoch, self.position = 0, 0  # of the batch that comes next
        check(len(self) > 0, f"{len(rows)} rows fill no batch of {batch_size * world}; lower the batch size")

    def __len__(self) -> int:
        """Batches per epoch."""
        size = self.batch_size * self.world
        return len(self.rows) // size if self.drop_last else -(-len(self.rows) // size)

    @property
    def has_short_batch(self) -> bool:
        """Whether an epoch ends with a batch that is not full, which several processes fill up and one does not."""
        return not self.drop_last and len(self.rows) % (self.batch_size * self.world) > 0

    def next(self) -> Batch:
        """The next batch; after the last one of an epoch the next epoch begins."""
        batch = self._batch(self._order(self.epoch), self.position)
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Endlessly `next`."""
        while True:
            yield self.next()

    def once(self) -> Iterator[Batch]:
        """Every row once, in order and without moving the position: for evaluation.

        Each process gets its own rows of each global batch. All get as many batches, for they may have to meet in each:
        the last one is empty for a process left without rows.
        """
        for first in range(0, len(self.rows), self.batch_size * self.world):
            start = first + self.rank * self.batch_size
            yield self.collate([self.rows[i] for i in range(start, min(start + self.batch_size, len(self.rows)))])

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        """Go on with the batch after those that had been taken when `state` was."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def fingerprint(self) -> str:
        """What tells other rows from these: sha256 of all of them."""
        if self._fingerprint is None:  # once: checkpoints ask for it
            self._fingerprint = f"all-{row_file.digest(self.rows)}"
        return self._fingerprint

    def is_of(self, fingerprint: str) -> bool:
        """Whether `fingerprint` was taken of these rows. Earlier releases took theirs of the number of rows and up to
        64 of them."""
        if fingerprint.startswith("all-"):
            return fingerprint == self.fingerprint()
        count = len(self.rows)
        some = [self.rows[i * count // min(count, 64)] for i in range(min(count, 64))]
        text = json.dumps([count, some], sort_keys=True, default=str)
        return fingerprint == hashlib.sha256(text.encode()).hexdigest()

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.shuffle:
            return range(len(self.rows))
        if self._shuffled[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._shuffled = (epoch, torch.randperm(len(self.rows), generator=generator).tolist())
        return self._shuffled[1]

    def _batch(self, order: Sequence[int], position: int) -> Batch:
        size = self.batch_size * self.world
        part = list(order[position * size : (position + 1) * size])
        if self.world > 1 and len(part) < size:
            part = [part[i] if i < len(part) else order[(i - len(part)) % len(order)] for i in range(size)]
        mine = part[self.rank * self.batch_size : (self.rank + 1) * self.batch_size]
        return self.collate([self.rows[i] for i in mine])
