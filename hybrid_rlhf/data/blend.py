"""Who gets which row: the deal of prompts among stages, the held-out part, and the blend of several sources."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

import numpy as np

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data import row_file
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.data.schema import Example

Index = Sequence[tuple[int, int]]  # (table, row)


def split_key(example: Example) -> str:
    """The text by which a row is dealt: its prompt, alike for a string and for one user message; else its texts."""
    if example.prompt:
        return _flat(example.prompt)
    texts = (example.text, example.messages, *(answer for answer, _ in example.answers))
    return "\n".join(_flat(text) for text in texts if text)


def _flat(prompt: Text) -> str:
    if isinstance(prompt, str):
        return prompt.strip()
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"].strip()
    return "\n".join(f"{m['role']}: {m['content'].strip()}" for m in prompt)


def deal(prompt_text: str, split: Sequence[float] | None) -> int:
    """The stage (position in `split`) that a prompt belongs to: by sha256 of its text, the same whatever the seed.

    With no split every prompt belongs to every stage; the answer is then 0.
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
    """Whether a prompt is kept for evaluation: by other bytes of the same hash, so independently of the deal."""
    return _fraction(prompt_text, 8) < eval_fraction


def _fraction(text: str, offset: int) -> float:
    """A number in [0, 1) from eight bytes of the text's sha256."""
    digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[offset : offset + 8], "big") / 2**64


class Blend:
    """Rows of several tables in one order, without copying them. index_of: the (table, row) of an epoch, where epochs
    have other rows than the first, whose `index` is."""

    def __init__(self, tables: Sequence[Sequence[dict]], index: Index,
                 index_of: Callable[[int], Index] | None = None) -> None:
        self.tables, self.index, self._index_of = tables, index, index_of

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> dict:
        table, row = self.index[i]
        return self.tables[table][row]

    def of_epoch(self, epoch: int) -> Blend:
        """The rows of an epoch, the first of which is number 0."""
        return self if self._index_of is None else Blend(self.tables, self._index_of(epoch))

    def num_distinct(self) -> int:
        return len(set(self.index))

    def digest(self) -> str:
        """sha256 of all rows and of their order."""
        found = hashlib.sha256("".join(row_file.digest(table) for table in self.tables).encode())
        found.update(np.array(self.index, dtype=np.int64).tobytes())
        return found.hexdigest()


def blend(tables: Sequence[Sequence[dict]], weights: Sequence[float | None], seed: int,
          max_samples: int | None = None) -> Blend:
    """All tables as one epoch of rows, in order of the tables.

    Without weights each row comes once. With weights w_i the epoch keeps its size N = sum of the sizes, and table i
    supplies N w_i / sum(w) rows of it: whole passes over the table, then a part chosen by `seed`, in each epoch the
    next part, so that every row comes before any comes again. max_samples keeps that many rows of the first epoch,
    chosen by `seed`, for all.
    """
    sizes = [len(t) for t in tables]
    given = [w is not None for w in weights]
    check(all(given) or not any(given), "data.sources: some have a weight and some do not; give it to all or none")
    counts = _shares(sizes, [float(w) for w in weights]) if any(given) else sizes
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
    """As many of `size` rows as `first`, which are those of the first epoch: each epoch takes the next ones of all rows
    in one order, round and round."""
    if not epoch:
        return sorted(first)
    others = sorted({*range(size)} - {*first})
    random.Random(seed).shuffle(others)
    order = [*first, *others]
    return sorted(order[(epoch * len(first) + i) % size] for i in range(len(first)))


def _shares(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """sum(sizes) rows dealt in proportion to the weights of the tables that have rows, by largest remainder."""
    weights = [w if size else 0.0 for w, size in zip(weights, sizes, strict=True)]
    total, whole = sum(sizes), sum(weights) or 1.0
    exact = [total * w / whole for w in weights]
    counts = [int(e) for e in exact]
    for i in sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[i] += 1
    return counts
