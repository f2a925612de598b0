"""Rows in a file, read one at a time: a line of JSON each, beside it where each line ends.

An Arrow table would do as well, but the library that writes it brings another for frames, and both are loaded at the
start of every run whose rows are new: half a second before the first step, for rows of token ids.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.own_files import fresh_folder

_ROWS, _ENDS = "rows.jsonl", "ends.npy"


class Table(Sequence):
    """The rows of a folder that `save` wrote, mapped into memory: only those that are asked for are read."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, EOFError or ValueError where the folder holds no whole table."""
        self._folder = folder
        if not all((folder / name).is_file() for name in (_ENDS, _ROWS)):
            raise ValueError(f"{folder} holds no whole table")
        self._ends = np.lib.format.open_memmap(folder / _ENDS, mode="r")
        size = (folder / _ROWS).stat().st_size
        if self._ends.dtype != np.int64 or self._ends.ndim != 1 or not len(self._ends) or self._ends[-1] != size:
            raise ValueError(f"{folder} holds no whole table")
        with (folder / _ROWS).open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> dict:
        """Raises UserError where the row is damaged."""
        i = range(len(self))[i]
        try:
            row = json.loads(self._text[self._ends[i - 1] if i else 0 : self._ends[i]])
        except (ValueError, RecursionError):
            row = None
        check(isinstance(row, dict), f"the tokenized rows in {self._folder} are damaged; remove that folder: they are "
                                     "made again")
        return row

    def digest(self) -> str:
        """sha256 of all rows, the same as that of the rows that were saved."""
        return hashlib.sha256(self._text).hexdigest()


def digest(rows: Sequence[dict]) -> str:
    """sha256 of all `rows` as `save` writes them; those that know theirs are asked."""
    if hasattr(rows, "digest"):
        return rows.digest()
    found = hashlib.sha256()
    for row in rows:
        found.update(_line(row, default=str))
    return found.hexdigest()


def _line(row: dict, **options: object) -> bytes:
    return json.dumps(row, separators=(",", ":"), **options).encode() + b"\n"


def save(rows: Sequence[dict], folder: Path) -> None:
    """Write rows of what JSON knows (one at least) at `folder`, whole or not at all; one that is there stays."""
    with fresh_folder(folder.parent) as made:
        lengths = []
        with (made / _ROWS).open("wb") as file:
            for row in rows:
                lengths.append(file.write(_line(row)))
        np.save(made / _ENDS, np.cumsum(lengths, dtype=np.int64), allow_pickle=False)
        if not folder.exists():
            made.rename(folder)


def read(folder: Path) -> Table | None:
    """The rows that `save` wrote, or None where there are none or they are damaged."""
    try:
        return Table(folder)
    except (OSError, ValueError, EOFError):  # the last: of a file without a byte
        return None
