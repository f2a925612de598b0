"""Where rows come from: embedded demo sets, files, folders, the hub. The only module that imports `datasets`."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.given_paths import check_file, expanded
from hybrid_rlhf.core.hub import stay_offline_if_unreachable
from hybrid_rlhf.data.files import MAX_START, PARSERS, check_columns, kind_of, read_file, read_start
from hybrid_rlhf.data.source import Source

# Generated on the spot, no file and no network: name -> module:function, a function () -> list of rows.
EMBEDDED = {f"demo/{name}": f"hybrid_rlhf.data.demo:{name}" for name in ("demonstrations", "preferences", "prompts")}
# Descriptions of a data set, not data.
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json",
             "dataset-metadata.json", "package.json"}
MAX_ENTRIES = 10_000  # of a folder of which some rows are shown
_SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


def read(source: Source) -> Sequence[dict]:
    """The rows of a source, columns renamed: a list, or a datasets.Dataset (memory-mapped) for parquet and the hub.

    Raises UserError, in one line, for whatever is missing, empty, malformed or of an unknown kind.
    """
    try:
        return _read(source)
    except MemoryError as error:
        raise UserError(f"{source.path} does not fit into memory; free some, or give it in parts") from error


def check_there(source: Source) -> None:
    """UserError for what is neither embedded nor there, and looks like no hub id; nothing is read."""
    check(source.path.startswith("demo/") or os.path.exists(expanded(source.path)) or not _looks_local(source.path),
          _missing(source.path))


def first_rows(source: Source, count: int = 3) -> tuple[list[dict], int | None]:
    """Some rows of a source, columns renamed, and how many it has (None: only a whole reading would tell). Large files
    are not read whole, and of the hub no more is loaded than is shown. Raises UserError as `read` does."""
    path = Path(expanded(source.path))
    if path.is_dir() and not source.path.startswith("demo/") and (large := _large_files(path, source)):
        return first_rows(replace(source, path=str(large[0]), name=None), count)[0], None
    if source.path.startswith("demo/") or path.is_dir():
        rows = read(source)
        return [rows[i] for i in range(min(count, len(rows)))], len(rows)
    if path.is_file():
        check_file(path, "data.sources:")
        check(bool(kind_of(path)), _unknown_kind(path))
        if kind_of(path) == ".parquet":
            found, number = _start_of_parquet(path, count)
        else:
            found, is_all = read_start(path, count)
            number = len(found) if is_all else None
    else:
        check_file(path, "data.sources:")
        check(not _looks_local(source.path), _missing(source.path))
        found, number = _start_of_hub(source, count), None
    check(bool(found), f"{source.path} is empty: no row in split {source.split}; give another file or split")
    return list(_renamed(found[:count], source)), number


def _large_files(folder: Path, source: Source) -> list[Path]:
    """The data files of a folder where they are too large to be read only to show some rows; else nothing."""
    entries = (name for _, folders, names in os.walk(_below(folder, source)) for name in (*folders, *names))
    check(next(islice(entries, MAX_ENTRIES, None), None) is None,
          f"{source.path} holds more than {MAX_ENTRIES:,} files and folders; give the folder of the data")
    files = [] if _is_saved(_below(folder, source)) else _files(folder, source)
    return files if sum(file.stat().st_size for file in files) > MAX_START else []


def _start_of_parquet(path: Path, count: int) -> tuple[list[dict], int]:
    from pyarrow.parquet import ParquetFile

    with _damage_told(path), ParquetFile(path) as file:
        check_columns(file.metadata.num_columns, path)
        batch = next(file.iter_batches(batch_size=count), None)
        return batch.to_pylist() if batch is not None else [], file.metadata.num_rows


def _start_of_hub(source: Source, count: int) -> list[dict]:
    stay_offline_if_unreachable()
    import datasets

    with _hub_errors_told(source), _quiet():
        rows = datasets.load_dataset(source.path, source.name, split=source.split, streaming=True)
        return list(islice(rows, count))


def _read(source: Source) -> Sequence[dict]:
    path = Path(expanded(source.path))
    if source.path.startswith("demo/"):
        rows = _embedded(source.path)
    elif path.is_dir():
        rows = _folder(path, source)
    elif path.is_file():
        rows = _file(path)
    else:
        check_file(path, "data.sources:")
        check(not _looks_local(source.path), _missing(source.path))
        rows = _hub(source)
    check(len(rows) > 0, f"{source.path} is empty: no row in split {source.split}; give another file or split")
    return _renamed(_without_media(rows), source)


@cache
def _embedded(path: str) -> list[dict]:
    check(path in EMBEDDED, f"there is no embedded data set {path}{nearest(path, EMBEDDED)}; "
                            f"there are {', '.join(EMBEDDED)}")
    module, function = EMBEDDED[path].split(":")
    return getattr(importlib.import_module(module), function)()


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or bool(kind_of(path)) or "\\" in path


def _file(path: Path) -> Sequence[dict]:
    kind = kind_of(path)
    check(bool(kind), _unknown_kind(path))
    return _parquet([path]) if kind == ".parquet" else read_file(path)


def _missing(path: str) -> str:
    return f"data.sources: {path} does not exist; give a file, a folder or a hub id"


def _unknown_kind(path: Path) -> str:
    return f"{path}: unknown kind of file; there are {', '.join((*PARSERS, '.parquet'))} (and .gz)"


def _parquet(paths: list[Path]) -> Sequence[dict]:
    import datasets
    from pyarrow.parquet import ParquetFile

    with _damage_told(paths[0]):
        for path in paths:
            with ParquetFile(path) as file:
                check_columns(file.metadata.num_columns, path)
        with _quiet():
            return datasets.Dataset.from_parquet([str(p) for p in paths])


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever the reader makes of a damaged file, it is the file that is wrong
        raise UserError(f"{path}: not a readable parquet file ({_first_line(error)}); "
                        "write it anew, or as jsonl") from error


def _folder(folder: Path, source: Source) -> Sequence[dict]:
    """The rows of a folder: a data set saved by `datasets`, or data files. Code in the folder is never run."""
    if _is_saved(_below(folder, source)):
        return _saved(_below(folder, source), source.split)
    files = _files(folder, source)
    parquet = [p for p in files if kind_of(p) == ".parquet"]
    rest = [p for p in files if kind_of(p) != ".parquet"]
    if not rest:
        return _parquet(parquet)
    return [row for p in rest for row in read_file(p)] + (list(_parquet(parquet)) if parquet else [])


def _below(folder: Path, source: Source) -> Path:
    found = folder / source.name if source.name else folder
    check(found.is_dir(), f"{source.path} has no subfolder {source.name}; leave `name` out, or give one that exists")
    return found


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _files(folder: Path, source: Source) -> list[Path]:
    """The data files of a folder that are of the split."""
    folder = _below(folder, source)
    found = [p for p in folder.rglob("*") if kind_of(p) and p.name not in _NOT_DATA
             and not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    for path in found:
        check_file(path, "data.sources:")
    files = sorted(p for p in found if p.is_file())
    texts = [p for p in files if kind_of(p) != ".txt"]  # beside data, a .txt is a licence or a note
    return _of_split(texts or files, folder, source.split)


def _of_split(files: list[Path], folder: Path, split: str) -> list[Path]:
    """The files whose path names the split; files that name none are the train split."""
    check(bool(files), f"{folder} holds no data: no {', '.join((*PARSERS, '.parquet'))} file in it; give "
                      "another folder")

    def words(path: Path) -> set[str]:
        text = str(path.relative_to(folder)).lower()
        for mark in "/\\.-_ ":
            text = text.replace(mark, " ")
        return set(text.split()) & {*_SPLIT_WORDS, split.lower()}

    named = {p: words(p) for p in files}
    chosen = [p for p in files if split.lower() in named[p] or (split == "train" and not named[p])]
    found = sorted({w for ws in named.values() for w in ws}) or ["train"]
    check(bool(chosen), f"{folder} has no split {split}; it has {', '.join(found)}")
    return chosen


def _saved(folder: Path, split: str) -> Sequence[dict]:
    import datasets

    for path in folder.rglob("*"):
        check_file(path, "data.sources:")
    _check_inside(folder)
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise UserError(f"{folder}: not a readable saved data set ({_first_line(error)}); "
                        "save it anew, or as jsonl") from error
    if isinstance(saved, datasets.DatasetDict):
        check(split in saved, f"{folder} has no split {split}; it has {', '.join(saved)}")
        return saved[split]
    return saved


def _check_inside(folder: Path) -> None:
    """UserError for a saved data set whose state names files elsewhere."""
    for state in [folder / "state.json", *folder.glob("*/state.json")]:
        try:
            found = json.loads(state.read_text(encoding="utf-8"))["_data_files"] if state.exists() else []
            names = [str(entry["filename"]) for entry in found]
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{folder}: not a readable saved data set ({state.name} is damaged); save it "
                            "anew, or as jsonl") from error
        for name in names:
            check(Path(name).name == name, f"{folder}: {state.name} names a file outside of its folder "
                                             f"({name[:80]}); save it anew, or as jsonl")


def _hub(source: Source) -> Sequence[dict]:
    stay_offline_if_unreachable()
    import datasets

    with _hub_errors_told(source), _quiet():
        return datasets.load_dataset(source.path, source.name, split=source.split)


def _without_media(rows: Sequence[dict]) -> Sequence[dict]:
    """The rows with {"type": "image"} for what a column holds that is declared as images, video or audio: nothing here
    reads them, and decoding them takes time and other libraries."""
    for name, feature in getattr(rows, "features", {}).items():
        if any(f"{kind}(" in repr(feature) for kind in ("Image", "Video", "Audio")):
            column = rows.select_columns(name).with_format("arrow")[:][name]
            there = [{"type": "image"} if _is_filled(value) else None for value in column]
            rows = rows.remove_columns(name).add_column(name, there)
    return rows


def _is_filled(scalar) -> bool:  # noqa: ANN001
    """Whether a scalar of arrow, or any in it, is no null; pictures are not looked at."""
    parts = scalar.values() if hasattr(scalar, "keys") else scalar if hasattr(scalar, "__iter__") else None
    return scalar.is_valid and (parts is None or any(map(_is_filled, parts)))


@contextmanager
def _hub_errors_told(source: Source) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # offline, missing, gated, a script: the library has a class for each
        raise UserError(f"data.sources: {source.path} is no file or folder here, and loading it from the hub failed: "
                        f"{type(error).__name__}: {_first_line(error)}; give another path") from error


def _renamed(rows: Sequence[dict], source: Source) -> Sequence[dict]:
    """The rows with source.columns applied; a column of theirs under one of our names gives way."""
    if not source.columns:
        return rows
    theirs = list(rows[0])
    for our_name, name in source.columns.items():
        check(name in theirs, f"{source.path} has no column {name!r} (wanted as {our_name}){nearest(name, theirs)}; "
                              f"it has {', '.join(theirs)}")
    taken = set(source.columns.values())
    return [{k: v for k, v in row.items() if k not in taken and k not in source.columns}
            | {our_name: row.get(name) for our_name, name in source.columns.items()} for row in rows]


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no word of every retry while loading; what fails in the end is one error."""
    import datasets

    was_on, logger = not datasets.are_progress_bars_disabled(), logging.getLogger("huggingface_hub")
    level = logger.level
    datasets.disable_progress_bars()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if was_on:
            datasets.enable_progress_bars()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
