"""Tokenized rows on disk, under a key of everything that made them. JSON, never a pickle."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.given_paths import expanded
from hybrid_rlhf.core.own_files import remove_folder, write_file
from hybrid_rlhf.data import row_file

Tables = tuple[Sequence[dict], Sequence[dict], dict]  # train, held-out, counts


def folder(cache_dir: str | None) -> Path:
    """cache_dir, else $HYBRID_RLHF_CACHE, else ~/.cache/hybrid_rlhf/data."""
    return Path(expanded(cache_dir or os.environ.get("HYBRID_RLHF_CACHE") or "~/.cache/hybrid_rlhf/data"))


def key(rows: Iterable[dict], tokenizer, settings: dict) -> str:  # noqa: ANN001
    """sha256 over every row, the tokenizer with its template, the settings, the code that renders and its libraries."""
    digest = hashlib.sha256()
    for part in (_code(), tokenizer_text(tokenizer), json.dumps(settings, sort_keys=True)):
        digest.update(part.encode("utf-8", "replace") + b"\0")
    for row in rows:
        digest.update(json.dumps(row, default=repr).encode() + b"\n")
    return digest.hexdigest()


@cache
def _code() -> str:
    """Whatever turns rows into tokens: a change of it makes old tables unreachable."""
    here = Path(__file__).parent
    names = ("template", "template_kwargs", "template_trial", "call_formats", "thoughts", "tokenizer")
    models = (here.parent / "models" / f"{name}.py" for name in names)
    files = [*sorted(here.glob("*.py")), *models]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("tokenizers", "transformers", "jinja2")]
    return "\n".join([*versions, *(f.read_text(encoding="utf-8") for f in files)])


def tokenizer_text(tokenizer) -> str:  # noqa: ANN001
    """A tokenizer as text: its whole backend (slow ones: vocabulary and settings), special tokens and template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocab = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    rest = {"class": type(tokenizer).__name__, "template": tokenizer.chat_template, "eos": tokenizer.eos_token_id,
            "special": {k: str(v) for k, v in tokenizer.special_tokens_map.items()}}
    rest |= {k: repr(getattr(tokenizer, k, None)) for k in ("add_bos_token", "add_eos_token", "add_prefix_space")}
    return vocab + json.dumps(rest, sort_keys=True)


def load(path: Path) -> Tables | None:
    """The tables under `path`, or None where there are none; damaged ones are removed."""
    file = path / "counts.json"
    if not os.path.lexists(file) and (path.is_dir() or not os.path.lexists(path)):
        return None  # another process may be writing them: counts.json is the last
    try:
        counts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        counts = None
    tables = [_table(path / name, counts[name]) for name in ("train", "held_out")] if _are_counts(counts) else [None]
    if None in tables:
        with suppress(OSError):
            remove_folder(path)
        return None
    return (*tables, counts)


def _are_counts(value: object) -> bool:
    """Whether these are the counts that `store` wrote."""
    if not isinstance(value, dict):
        return False
    by_reason = [value.get(name) for name in ("dropped", "rendered", "unread")]
    if not all(isinstance(counts, dict) for counts in by_reason):
        return False
    numbers = [value.get(name) for name in ("read", "other_stages", "truncated", "train", "held_out")]
    numbers += [number for counts in by_reason for number in counts.values()]
    return all(type(number) is int and number >= 0 for number in numbers)


def _table(path: Path, size: int) -> Sequence[dict] | None:
    """The rows of a table of `size` rows, or None where they are damaged."""
    rows = row_file.read(path) if size else []
    return rows if rows is not None and len(rows) == size else None


def store(path: Path, tables: Tables) -> None:
    """Keep the tables under `path`; a folder that cannot be written to costs time, not the run."""
    train, held_out, counts = tables
    try:
        for name, rows in (("train", train), ("held_out", held_out)):
            if rows:
                row_file.save(rows, path / name)
        path.mkdir(parents=True, exist_ok=True)
        write_file(path / "counts.json", json.dumps(counts))  # last: it says that the rest is complete
    except (OSError, UserError):
        return
