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

    rows: those with of_epoch(number) are asked for the rows of each epoch, always as many. batch_size: rows per batch
    and process. Every process cuts its own part out of one global batch of batch_size * world rows, so the order of the
    data does not depend on the number of processes as long as batch_size * world does not. collate: a list of rows -> a
    batch. drop_last: whether the rest of an epoch that fills no global batch is skipped. False: processes share it
    evenly, and some may have none of it. None: it is skipped unless the epoch would then be empty, and is else filled
    up from its beginning where there are several processes, so that each has rows.
    """

    def __init__(self, rows: Sequence[dict], batch_size: int, collate: Callable[[list[dict]], Batch], seed: int, *,
                 rank: int = 0, world: int = 1, shuffle: bool = True, drop_last: bool | None = None) -> None:
        check(batch_size >= 1, f"the batch size is {batch_size}; it must be at least 1")
        check(len(rows) > 0, "there are no rows to load")
        self.rows, self.batch_size, self.collate, self.seed = rows, batch_size, collate, seed
        self.rank, self.world, self.shuffle = rank, world, shuffle
        self.drop_last = len(rows) >= batch_size * world if drop_last is None else drop_last
        self.fills_up = drop_last is None and not self.drop_last and self.num_left > 0
        self._shuffled: tuple[int | None, Sequence[dict], Sequence[int]] = (None, rows, [])
        self._fingerprint: str | None = None
        self.epoch, self.position = 0, 0  # of the batch that comes next
        check(len(self) > 0, f"{len(rows)} rows fill no batch of {batch_size * world}; lower the batch size")

    def __len__(self) -> int:
        """Batches per epoch."""
        size = self.batch_size * self.world
        return len(self.rows) // size if self.drop_last else -(-len(self.rows) // size)

    @property
    def num_left(self) -> int:
        """Rows of an epoch that fill no global batch."""
        return len(self.rows) % (self.batch_size * self.world)

    def next(self) -> Batch:
        """The next batch; after the last one of an epoch the next epoch begins."""
        batch = self._batch(*self._order(self.epoch), self.position)
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Endlessly `next`."""
        while True:
            yield self.next()

    def typical(self, count: int) -> Batch:
        """A batch of `count` rows (of all, where there are fewer) from everywhere in the data; moves nothing."""
        rows, count = self._order(self.epoch)[0], min(count, len(self.rows))
        return self.collate([rows[i * len(rows) // count] for i in range(count)])

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

    def _order(self, epoch: int) -> tuple[Sequence[dict], Sequence[int]]:
        """The rows of an epoch, and the order in which they come."""
        if self._shuffled[0] != epoch:
            rows = self.rows.of_epoch(epoch) if hasattr(self.rows, "of_epoch") else self.rows
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(len(rows), generator=generator).tolist() if self.shuffle else range(len(rows))
            self._shuffled = (epoch, rows, order)
        return self._shuffled[1:]

    def _batch(self, rows: Sequence[dict], order: Sequence[int], position: int) -> Batch:
        size = self.batch_size * self.world
        part = list(order[position * size : (position + 1) * size])
        if self.fills_up and self.world > 1:  # there is one batch in an epoch
            part = [part[i] if i < len(part) else order[(i - len(part)) % len(order)] for i in range(size)]
        first, end = (len(part) * number // self.world for number in (self.rank, self.rank + 1))
        return self.collate([rows[i] for i in part[first:end]])
