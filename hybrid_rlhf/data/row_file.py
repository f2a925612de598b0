"""Rows in a file, read one at a time: a line of JSON each, beside it where each line ends.

An Arrow table would do as well, but the library that writes it brings another for frames, and both are loaded at the
start of every run whose rows are new: half a second before the first step, for rows of token ids.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

_ROWS, _ENDS = "rows.jsonl", "ends.npy"


class Table(Sequence):
    """The rows of a folder that `save` wrote, mapped into memory: only those that are asked for are read."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, EOFError or ValueError where the folder holds no whole table."""
        self._ends = np.load(folder / _ENDS, mmap_mode="r", allow_pickle=False)
        size = (folder / _ROWS).stat().st_size
        if self._ends.dtype != np.int64 or self._ends.ndim != 1 or not len(self._ends) or self._ends[-1] != size:
            raise ValueError(f"{folder} holds no whole table")
        with (folder / _ROWS).open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> dict:
        i = range(len(self))[i]
        return json.loads(self._text[self._ends[i - 1] if i else 0 : self._ends[i]])


def save(rows: Sequence[dict], folder: Path) -> None:
    """Write rows of what JSON knows (one at least) at `folder`, whole or not at all; one that is there stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
    try:
        lengths = []
        (scratch / "table").mkdir()
        with (scratch / "table" / _ROWS).open("wb") as file:
            for row in rows:
                lengths.append(file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n"))
        np.save(scratch / "table" / _ENDS, np.cumsum(lengths, dtype=np.int64), allow_pickle=False)
        if not folder.exists():
            os.replace(scratch / "table", folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def read(folder: Path) -> Table | None:
    """The rows that `save` wrote, or None where there are none or they are damaged."""
    try:
        return Table(folder)
    except (OSError, ValueError, EOFError):  # the last: of a file without a byte
        return None
