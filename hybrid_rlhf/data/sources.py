"""Read rows from sources: embedded demo sets, files, folders, the hub. The only module that imports `datasets`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path, PurePath
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError, as_part, check, nearest
from hybrid_rlhf.core.hub import stay_offline_if_unreachable
from hybrid_rlhf.core.options import expanded, nearest_path
from hybrid_rlhf.data import demo
from hybrid_rlhf.data.files import MAX_START, PARSERS, kind_of, read_file, read_start
from hybrid_rlhf.data.row_images import is_filled

# Generated, without files and network.
EMBEDDED = {f"demo/{rows.__name__}": cache(rows) for rows in (demo.demonstrations, demo.preferences, demo.prompts)}
# Files that describe a data set, not data.
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json",
             "dataset-metadata.json", "package.json"}
MAX_ENTRIES = 10_000  # of a folder in a preview of rows; the studio makes one while a path is typed
_SPLIT_WORDS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Source:
    """One source of rows.

    Attributes:
        path: demo/demonstrations, demo/preferences, demo/prompts; a jsonl, json, csv, tsv, txt or parquet file (.gz
            too); a folder of such files or a saved data set; or a hub id.
        name: Configuration of a hub data set, or subfolder of a folder.
        split: Which split (a single file has no splits and is read in full).
        weight: Share of the training rows relative to the other sources' weights. Without any weight every row is
            used once per epoch; give weights to all sources or to none.
        columns: Our column names and theirs, such as {prompt: question}.
        stages: Stages that read this source; empty means every stage it has the columns for.
    """

    path: str
    name: str | None = None
    split: str = "train"
    weight: float | None = None
    columns: dict[str, str] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(bool(self.path), "a source has no path; give a file, a folder, a hub id or demo/<name>")
        check(self.weight is None or 0 < self.weight < float("inf"),
              f"weight of {self.path} is {self.weight}; it must be positive")


class Reads(NamedTuple):
    """The rows that a stage trains on, or samples from.

    stage: its name, as in `stages` of a source. kind: the kind of its examples (MAKERS in examples.py). share: its
    position in data.split.
    """

    stage: str
    kind: str
    share: int


Named = Source | str | PurePath | Mapping  # one source in a user's settings


def as_sources(setting: Sequence[Named] | Named | None, option: str = "data.sources") -> list[Source]:
    """The value of data.sources (or `option`) as a list of Source: one source or a list, each a path or a mapping.

    Settings are data: a mapping is read key by key, and nothing that it names is imported. UserError for other types,
    for unknown keys and for values of the wrong type.
    """
    if setting is None:
        return []
    items = setting if isinstance(setting, (list, tuple)) else [setting]
    return [item if isinstance(item, Source) else _source(item, option) for item in items]


def _source(item: object, option: str) -> Source:
    if isinstance(item, (str, PurePath)):
        check(not str(item).startswith(("[", "{")), f"{option}: {item} is not a path; write a path, or a list such as "
                                                    "[a.jsonl, {path: b.jsonl}]")
        return Source(str(item))
    check(isinstance(item, Mapping), f"{option}: {item!r:.60} is not a source; give a path, or {{path: ...}}")
    if isinstance(item.get("path"), PurePath):
        item = {**item, "path": str(item["path"])}
    return as_part(Source, item, option)


def read(source: Source) -> Sequence[dict]:
    """The rows of a source, columns renamed: a list, or a datasets.Dataset (memory-mapped) for parquet and the hub.

    Raises UserError, in one line, for anything missing, empty, malformed or of an unknown kind.
    """
    path = Path(expanded(source.path))
    if source.path.startswith("demo/"):
        rows = _embedded(source.path)
    elif path.is_dir():
        rows = _folder(_below(path, source), source.split)
    elif path.is_file():
        rows = _parquet([path]) if _known_kind(path) == ".parquet" else read_file(path)
    else:
        rows = _hub(source)
    check(len(rows) > 0, f"{source.path} is empty: no row in split {source.split}; give another file or split")
    return _renamed(undecoded(rows), source)


def folder_of(source: Source) -> Path:
    """The folder that paths in the rows of a source are relative to."""
    path = Path(expanded(source.path))
    return path.parent if path.is_file() else path / source.name if source.name else path


def check_there(source: Source) -> None:
    """UserError for a source that is neither embedded nor exists nor looks like a hub id; nothing is read."""
    if not source.path.startswith("demo/") and not os.path.exists(expanded(source.path)):
        _check_is_hub_id(source.path)


def first_rows(source: Source, count: int = 3) -> tuple[list[dict], int | None]:
    """Some rows of a source, columns renamed, and how many it has (None: unknown without reading all). Of large files
    only a part is read, and from the hub only these rows are loaded. Raises UserError as `read` does."""
    path = Path(expanded(source.path))
    is_demo = source.path.startswith("demo/")
    if path.is_dir() and not is_demo and not _is_saved(folder := _below(path, source)):
        entries = (name for _, folders, names in os.walk(folder) for name in (*folders, *names))
        check(next(islice(entries, MAX_ENTRIES, None), None) is None,
              f"{source.path} holds more than {MAX_ENTRIES:,} files and folders; give the folder of the data")
        files = _files(folder, source.split)
        if sum(file.stat().st_size for file in files) > MAX_START:
            return first_rows(replace(source, path=str(files[0]), name=None), count)[0], None
    if is_demo or path.is_dir():
        rows = read(source)
        return [rows[i] for i in range(min(count, len(rows)))], len(rows)
    number = None
    if not path.is_file():
        rows = _hub(source, count)
    elif _known_kind(path) == ".parquet":
        rows, number = _start_of_parquet(path, count)
    else:
        rows, is_all = read_start(path, count)
        number = len(rows) if is_all else None
    check(bool(rows), f"{source.path} is empty: no row in split {source.split}; give another file or split")
    return list(_renamed(rows[:count], source)), number


def _start_of_parquet(path: Path, count: int) -> tuple[list[dict], int]:
    from pyarrow.parquet import ParquetFile

    with _explained(f"{path}: not a readable parquet file"), ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=count), None)
        return batch.to_pylist() if batch is not None else [], file.metadata.num_rows


def _embedded(path: str) -> list[dict]:
    check(path in EMBEDDED, f"there is no embedded data set {path}{nearest(path, EMBEDDED)}; "
                            f"there are {', '.join(EMBEDDED)}")
    return EMBEDDED[path]()


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or bool(kind_of(path)) or "\\" in path


def _check_is_hub_id(path: str) -> None:
    check(not _looks_local(path), f"data.sources: {path} does not exist{nearest_path(expanded(path))}; give a file, a "
                                  "folder or a hub id")


def _known_kind(path: Path) -> str:
    kind = kind_of(path)
    check(bool(kind), f"{path}: unknown kind of file; there are {', '.join((*PARSERS, '.parquet'))} (and .gz)")
    return kind


def _parquet(paths: list[Path]) -> Sequence[dict]:
    import datasets

    with _explained(f"{paths[0]}: not a readable parquet file"), _quiet():
        return datasets.Dataset.from_parquet([str(p) for p in paths])


@contextmanager
def _explained(what: str, cure: str = "write it anew, or as jsonl") -> Iterator[None]:
    """The error of a library, of whatever class, as one line."""
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:300]
        raise UserError(f"{what} ({type(error).__name__}: {first}); {cure}") from error


def _folder(folder: Path, split: str) -> Sequence[dict]:
    """The rows of a folder: a data set saved by `datasets`, or data files. Code in the folder is never run."""
    if _is_saved(folder):
        return _saved(folder, split)
    files = _files(folder, split)
    parquet = [p for p in files if kind_of(p) == ".parquet"]
    rest = [p for p in files if kind_of(p) != ".parquet"]
    if not rest:
        return _parquet(parquet)
    return [row for p in rest for row in read_file(p)] + (list(undecoded(_parquet(parquet))) if parquet else [])


def _below(folder: Path, source: Source) -> Path:
    below = folder / source.name if source.name else folder
    check(below.is_dir(), f"{source.path} has no subfolder {source.name}; leave `name` out, or give one that exists")
    return below


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()


def _files(folder: Path, split: str) -> list[Path]:
    """The data files of a folder that belong to the split."""
    paths = [p for p in folder.rglob("*") if kind_of(p) and p.name not in _NOT_DATA
             and not any(part.startswith(".") for part in p.relative_to(folder).parts)]
    files = sorted(p for p in paths if p.is_file())
    texts = [p for p in files if kind_of(p) != ".txt"]  # a .txt beside data is a licence or a note
    return _of_split(texts or files, folder, split)


def _of_split(files: list[Path], folder: Path, split: str) -> list[Path]:
    """The files whose path names the split; files that name no split are the train split."""
    check(bool(files), f"{folder} holds no data: no {', '.join((*PARSERS, '.parquet'))} file in it; give "
                      "another folder")
    known = {*_SPLIT_WORDS, split.lower()}
    named = {p: known & set(re.split(r"[/\\._\s-]", str(p.relative_to(folder)).lower())) for p in files}
    chosen = [p for p in files if split.lower() in named[p] or (split == "train" and not named[p])]
    splits = sorted({w for ws in named.values() for w in ws}) or ["train"]
    check(bool(chosen), f"{folder} has no split {split}; it has {', '.join(splits)}")
    return chosen


def _saved(folder: Path, split: str) -> Sequence[dict]:
    import datasets

    with _explained(f"{folder}: not a readable saved data set"):
        saved = datasets.load_from_disk(str(folder))
    if isinstance(saved, datasets.DatasetDict):
        check(split in saved, f"{folder} has no split {split}; it has {', '.join(saved)}")
        return saved[split]
    return saved


def _hub(source: Source, count: int | None = None) -> Sequence[dict]:
    """The rows of a hub data set. count: only as many, and no more is loaded."""
    _check_is_hub_id(source.path)
    stay_offline_if_unreachable()
    import datasets

    with _quiet(), _explained(f"data.sources: {source.path} is not a local file or folder{nearest_path(source.path)}, "
                              "and loading it from the hub failed", "give another path"):
        rows = datasets.load_dataset(source.path, source.name, split=source.split, streaming=count is not None)
        return rows if count is None else list(islice(rows, count))


class _Undecoded(Sequence):
    """The rows of a datasets.Dataset with images, video and audio as they are stored, {"bytes", "path"}: decoding takes
    time and other libraries. kinds: column -> image, video or audio, which its values then say."""

    def __init__(self, rows, kinds: Mapping[str, str], change: Callable = dict) -> None:  # noqa: ANN001
        self._rows, self._kinds, self._change = rows, kinds, change
        stored = [name for name, feature in rows.features.items() if _is_media(feature)]
        self._stored = rows.select_columns(stored).with_format("arrow")
        self._others = rows.remove_columns(stored)  # decoded: datasets keeps parts of messages as JSON text

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict:
        row = self._stored[i].to_pylist()[0] | (self._others[i] if self._others.column_names else {})
        media = {name: {"type": kind, kind: row[name]} for name, kind in self._kinds.items() if is_filled(row[name])}
        return self._change(row | dict.fromkeys(self._kinds) | media)

    def changed(self, change: Callable) -> Sequence[dict]:
        """The rows, each changed when it is read."""
        return _Undecoded(self._rows, self._kinds, change)


def _is_media(feature: object) -> bool:
    """Whether a feature of datasets has images, video or audio somewhere in it."""
    return any(f"{kind}(" in repr(feature) for kind in ("Image", "Video", "Audio"))


def undecoded(rows: Sequence[dict]) -> Sequence[dict]:
    """Rows with images, video and audio as they are stored; any others, and rows without such columns, unchanged."""
    features = getattr(rows, "features", None) or {}
    if not any(map(_is_media, features.values())):
        return rows
    inner = {name: type(getattr(feature, "feature", feature)).__name__.lower() for name, feature in features.items()}
    return _Undecoded(rows, {name: kind for name, kind in inner.items() if kind in ("image", "video", "audio")})


def _renamed(rows: Sequence[dict], source: Source) -> Sequence[dict]:
    """The rows with source.columns applied; it replaces existing columns of the same name."""
    if not source.columns:
        return rows
    theirs = list(rows[0])
    for our_name, name in source.columns.items():
        check(name in theirs, f"{source.path} has no column {name!r} (wanted as {our_name}){nearest(name, theirs)}; "
                              f"it has {', '.join(theirs)}")
    taken = set(source.columns.values())

    def change(row: dict) -> dict:
        kept = {k: v for k, v in row.items() if k not in taken and k not in source.columns}
        return kept | {our_name: row.get(name) for our_name, name in source.columns.items()}

    return rows.changed(change) if isinstance(rows, _Undecoded) else list(map(change, rows))


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the block no progress bars and no logging of retries; a final failure is one error."""
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
