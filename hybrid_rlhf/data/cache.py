"""Cache of tokenized rows on disk, under a hash of all their inputs. JSON, never a pickle.

`datasets` has its own cache, but importing it takes half a second at the start of every run, longer than a demo takes
to tokenize, and a checkpoint identifies its rows by the sha256 of the lines that are written here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.options import expanded
from hybrid_rlhf.core.own_files import fresh_folder, put

Tables = tuple[Sequence[dict], Sequence[dict], dict]  # train, held-out, counts
_COUNTS = "counts.json"


class Table(Sequence):
    """The rows of NAME.jsonl, memory-mapped and parsed one at a time. NAME.npy holds the end of each line."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises OSError or ValueError where the two files do not match."""
        self._ends = np.lib.format.open_memmap(folder / f"{name}.npy", mode="r")
        with (folder / f"{name}.jsonl").open("rb") as file:
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._ends[-1] != len(self._text):
            raise ValueError(f"{folder / name}.jsonl is cut off")

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> dict:
        i = range(len(self))[i]
        return json.loads(self._text[self._ends[i - 1] if i else 0 : self._ends[i]])

    def digest(self) -> str:
        """sha256 of all rows, equal to that of the rows before saving."""
        return hashlib.sha256(self._text).hexdigest()


def rows_digest(rows: Sequence[dict]) -> str:
    """sha256 of all `rows` as `save` writes them."""
    if hasattr(rows, "digest"):
        return rows.digest()
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_line(row, default=str))
    return digest.hexdigest()


def _line(row: dict, **options: object) -> bytes:
    return json.dumps(row, separators=(",", ":"), **options).encode() + b"\n"


def save(rows: Sequence[dict], folder: Path, name: str) -> None:
    """Write rows (at least one) of plain JSON types."""
    with (folder / f"{name}.jsonl").open("wb") as file:
        lengths = [file.write(_line(row)) for row in rows]
    np.save(folder / f"{name}.npy", np.cumsum(lengths, dtype=np.int64), allow_pickle=False)


def folder(cache_dir: str | None) -> Path:
    """cache_dir, else $HYBRID_RLHF_CACHE, else ~/.cache/hybrid_rlhf/data."""
    return Path(expanded(cache_dir or os.environ.get("HYBRID_RLHF_CACHE") or "~/.cache/hybrid_rlhf/data"))


def key(rows: Iterable[dict], tokenizer, settings: dict, images: Callable[[dict], str] | None = None  # noqa: ANN001
        ) -> str:
    """sha256 over every row, the tokenizer with its template, the settings, the code that renders and its libraries.
    images: what else the images of a row depend on."""
    digest = hashlib.sha256()
    for part in (_code(), tokenizer_text(tokenizer), json.dumps(settings, sort_keys=True)):
        digest.update(part.encode("utf-8", "replace") + b"\0")
    for row in rows:
        digest.update((line := json.dumps(row, default=_short).encode()) + b"\n")
        if images is not None and b"image" in line.lower():  # names of columns in any case
            digest.update(images(row).encode())
    return digest.hexdigest()


def _short(value: object) -> str:
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else repr(value)


@cache
def _code() -> str:
    """The source code that turns rows into tokens: any change of it invalidates old tables."""
    package = Path(__file__).parents[1]
    files = [path for name in ("data", "models") for path in sorted((package / name).glob("*.py"))]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tokenizers", "transformers", "jinja2")]
    return "\n".join([*versions, *(path.read_text(encoding="utf-8") for path in files)])


def tokenizer_text(tokenizer) -> str:  # noqa: ANN001
    """A tokenizer as text: its full backend (slow ones: vocabulary and settings), special tokens and template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocab = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    rest = {"class": type(tokenizer).__name__, "template": tokenizer.chat_template, "eos": tokenizer.eos_token_id,
            "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()}}
    rest |= {k: repr(getattr(tokenizer, k, None)) for k in ("add_bos_token", "add_eos_token", "add_prefix_space")}
    return vocab + json.dumps(rest, sort_keys=True)


def load(path: Path) -> Tables | None:
    """The tables that `store` wrote to `path`; None where they are missing or incomplete (a power cut)."""
    try:
        counts = json.loads((path / _COUNTS).read_text(encoding="utf-8"))
        train, held_out = (Table(path, name) if counts[name] else [] for name in ("train", "held_out"))
    except (OSError, ValueError, LookupError):
        return None
    return train, held_out, counts


def store(path: Path, tables: Tables) -> None:
    """Write the tables to `path`; errors of writing are ignored, since the cache only saves time."""
    train, held_out, counts = tables
    try:
        with fresh_folder(path.parent) as beside:
            for name, rows in (("train", train), ("held_out", held_out)):
                if rows:
                    save(rows, beside, name)
            (beside / _COUNTS).write_text(json.dumps(counts), encoding="utf-8")
            if load(path) is None:
                put(beside, path)
    except (OSError, UserError):
        return
