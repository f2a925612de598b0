"""Batches in an order determined by (seed, epoch), resumable from any position."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data.cache import rows_digest
from hybrid_rlhf.data.examples import decode_columns
from hybrid_rlhf.data.row_images import name_of
from hybrid_rlhf.data.schema import Example
from hybrid_rlhf.data.turns import Text

Batch = TypeVar("Batch")
Index = Sequence[tuple[int, int]]  # (table, row)


def split_key(example: Example) -> str:
    """The text whose hash assigns a row to a stage: its prompt (a string or one user message alike), else all texts.
    Images count by the names of their files, or by their bytes, so that it is the same on every machine."""
    if example.prompt:
        return _flat(example.prompt) + "".join(map(name_of, example.images))
    texts = (example.text, example.messages, *(answer for answer, _ in example.answers))
    return "\n".join(_flat(text) for text in texts if text)


def _flat(prompt: Text) -> str:
    if isinstance(prompt, str):
        return prompt.strip()
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"].strip()
    return "\n".join(f"{m['role']}: {m['content'].strip()}" for m in prompt)


def deal(prompt_text: str, split: Sequence[float] | None) -> int:
    """The stage (position in `split`) of a prompt: by sha256 of its text, independent of the seed.

    Without a split every prompt belongs to every stage; returns 0.
    """
    if not split:
        return 0
    point, bound = _fraction(prompt_text, 0) * sum(split), 0.0
    for stage, share in enumerate(split):
        bound += share
        if point < bound:
            return stage
    return max(i for i, share in enumerate(split) if share > 0)


def is_held_out(prompt_text: str, eval_fraction: float) -> bool:
    """Whether a prompt is kept for evaluation: by other bytes of the same hash, so independent of the stage."""
    return _fraction(prompt_text, 8) < eval_fraction


def _fraction(text: str, offset: int) -> float:
    """A number in [0, 1) from eight bytes of the text's sha256."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[offset : offset + 8], "big") / 2**64


class Blend:
    """Rows of several tables in one order, without copying them, a prompt's columns decoded. index: (table, row) of the
    first epoch; index_of: that of any epoch, where epochs differ."""

    def __init__(self, tables: Sequence[Sequence[dict]], index: Index,
                 index_of: Callable[[int], Index] | None = None) -> None:
        self.tables, self.index, self._index_of = tables, index, index_of

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> dict:
        table, row = self.index[i]
        return decode_columns(self.tables[table][row])

    def of_epoch(self, epoch: int) -> Blend:
        """The rows of an epoch, counted from 0."""
        return self if self._index_of is None else Blend(self.tables, self._index_of(epoch))

    def num_distinct(self) -> int:
        return len(set(self.index))

    def digest(self) -> str:
        """sha256 of all rows and of their order."""
        digest = hashlib.sha256("".join(rows_digest(table) for table in self.tables).encode())
        digest.update(np.array(self.index, dtype=np.int64).tobytes())
        return digest.hexdigest()


def blend(tables: Sequence[Sequence[dict]], weights: Sequence[float | None], seed: int,
          max_samples: int | None = None) -> Blend:
    """All tables as one epoch of rows, in order of the tables.

    Without weights each row comes once. With weights w_i the epoch keeps its size N = sum of the sizes, and table i
    supplies N w_i / sum(w) rows of it: full passes over the table, then a part chosen by `seed`, in each epoch the
    next part, so that every row is used before any is used again. max_samples keeps that many rows of the first epoch,
    chosen by `seed`, for all epochs.
    """
    sizes = [len(t) for t in tables]
    shares = [w for w in weights if w is not None]  # all or none, as DataConfig checks
    counts = _shares(sizes, shares) if shares else sizes
    rng = random.Random(seed)
    first = [rng.sample(range(size), count % size) if size else [] for size, count in zip(sizes, counts, strict=True)]

    def index_of(epoch: int) -> Index:
        return [(t, row) for t, (size, count) in enumerate(zip(sizes, counts, strict=True)) if size
                for row in [*range(size)] * (count // size) + _part(first[t], size, epoch, seed)]

    index = index_of(0)
    if max_samples is not None and max_samples < len(index):
        return Blend(tables, sorted(rng.sample(index, max_samples)))
    return Blend(tables, index, index_of if any(first) else None)


def _part(first: Sequence[int], size: int, epoch: int, seed: int) -> list[int]:
    """The len(first) of `size` rows for an epoch; `first` are those of the first: each epoch takes the next ones of all
    rows in one order, cyclically."""
    if not epoch:
        return sorted(first)
    others = sorted({*range(size)} - {*first})
    random.Random(seed).shuffle(others)
    order = [*first, *others]
    return sorted(order[(epoch * len(first) + i) % size] for i in range(len(first)))


def _shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """sum(sizes) rows dealt in proportion to the weights of the tables that have rows, by largest remainder."""
    weights = [w if size else 0.0 for w, size in zip(weights, sizes, strict=True)]
    total, total_weight = sum(sizes), sum(weights) or 1.0
    exact = [total * w / total_weight for w in weights]
    counts = [int(e) for e in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts


class Loader(Generic[Batch]):
    """Endless batches of `rows`, and single ordered passes.

    rows: may have of_epoch(number), the rows of an epoch, always equally many. batch_size: rows per batch and process.
    Every process takes its part of one global batch of batch_size * world rows, so the order of the data does not
    depend on the number of processes as long as batch_size * world does not. collate: a list of rows -> a batch.
    drop_last: whether the rest of an epoch that does not fill a global batch is skipped. False: processes share it
    evenly, and some may have none of it. None: it is skipped unless the epoch would be empty; then it is filled up from
    its beginning with several processes, so that each has rows.
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
        """Rows of an epoch after its last full global batch."""
        return len(self.rows) % (self.batch_size * self.world)

    def next(self) -> Batch:
        """The next batch; after the last of an epoch the next epoch starts."""
        batch = self._batch(*self._order(self.epoch), self.position)
        self.position += 1
        if self.position == len(self):
            self.epoch, self.position = self.epoch + 1, 0
        return batch

    def __iter__(self) -> Iterator[Batch]:
        """Yield `next` forever."""
        while True:
            yield self.next()

    def typical(self, count: int) -> Batch:
        """A batch of `count` rows (or all, if fewer) evenly spaced in the data; does not move the position."""
        rows, count = self._order(self.epoch)[0], min(count, len(self.rows))
        return self.collate([rows[i * len(rows) // count] for i in range(count)])

    def once(self) -> Iterator[Batch]:
        """Every row once, in order and without moving the position: for evaluation.

        Each process gets its own rows of each global batch. All get equally many batches, since collectives may run in
        each: the last one is empty for a process without rows.
        """
        for first in range(0, len(self.rows), self.batch_size * self.world):
            start = first + self.rank * self.batch_size
            yield self.collate([self.rows[i] for i in range(start, min(start + self.batch_size, len(self.rows)))])

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue after the batches taken before `state` was saved."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def fingerprint(self) -> str:
        """A string that identifies these rows: sha256 of all of them."""
        if self._fingerprint is None:  # once: checkpoints ask for it
            self._fingerprint = f"all-{rows_digest(self.rows)}"
        return self._fingerprint

    def _order(self, epoch: int) -> tuple[Sequence[dict], Sequence[int]]:
        """The rows of an epoch, and their order."""
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
