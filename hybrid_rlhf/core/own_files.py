"""Files and folders of ours: they appear whole, are made under names that nobody had, and lead nowhere else.

What is written gets a fresh name beside its place and is renamed at the end, so that nothing of the user's is ever
taken for a half-written file of ours.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hybrid_rlhf.core.config import check

_UNFINISHED = ".hybrid_rlhf-"
_IS_UNFINISHED = re.compile(rf"{re.escape(_UNFINISHED)}[0-9a-f]{{16}}")


def fresh_path(folder: Path) -> Path:
    """A path in `folder` that nothing has, for what is renamed when it is whole."""
    return folder / f"{_UNFINISHED}{secrets.token_hex(8)}"


def is_unfinished(name: str) -> bool:
    """Whether `fresh_path` made this name: what has it was never finished."""
    return _IS_UNFINISHED.fullmatch(name) is not None


def clear_unfinished(folder: Path) -> None:
    """Remove what processes that were killed left in `folder`, which no other process is writing to."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        if is_unfinished(path.name):
            _remove(path)


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A new empty folder in `folder`, gone at the end of the block unless it was renamed."""
    path = fresh_path(folder)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def whole(*targets: Path) -> Iterator[list[Path]]:
    """Paths to write files or folders to; they take the place of `targets` when the block ends well, and are removed
    however else it ends. Raises UserError where a target is a link."""
    for target in targets:
        check(not target.is_symlink(), f"{target} is a link, and what is written there would be somebody else's; "
                                       "remove the link")
    beside, old = [fresh_path(target.parent) for target in targets], []
    try:
        yield beside
        for path, target in zip(beside, targets, strict=True):
            if path.is_dir():
                old += _exchange(path, target)
            else:
                os.replace(path, target)
    finally:
        _discard(old)
        for path in beside:
            if os.path.lexists(path):
                _remove(path)


def write_file(path: Path, content: str | bytes) -> None:
    """A file with `content` (text in UTF-8), whole and on the disk, in place of one that was there. Raises UserError
    where a link is there, and OSError where the disk refuses."""
    with whole(path) as (beside,), beside.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def put(made: Path, target: Path) -> None:
    """The folder `made` takes the place of `target`, a folder of ours that is removed if it is there."""
    _discard(_exchange(made, target))


def _exchange(made: Path, target: Path) -> list[Path]:
    """The folder `made` under the name `target`; what had that name before is where this says."""
    if not os.path.lexists(target):
        made.rename(target)
        return []
    old = fresh_path(target.parent)
    target.rename(old)  # out of sight first: a crash in the midst leaves no half of it under its name
    made.rename(target)
    return [old]


def _discard(paths: Collection[Path]) -> None:
    """Remove what has been replaced. What cannot go yet (NFS keeps open files) loses nothing by staying."""
    for path in paths:
        with suppress(OSError):
            _remove(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of ours (or what stands in its place), out of sight first."""
    doomed = fresh_path(path.parent)
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """A link goes, and what it leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that follows no link at the last part of a path: OSError for one."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def check_inside(folder: Path, foreign: Collection[str] = ()) -> None:
    """UserError unless all that is below the output folder `folder` are files and folders: through a link, what is
    written or removed here would be so elsewhere. foreign: folders at its top that others fill as they like."""
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            inner, kind = Path(where, name).relative_to(folder), _kind(Path(where, name))
            check(not stat.S_ISLNK(kind), f"output_dir {folder} holds a link ({inner}), which leads to files that are "
                                          "not the run's; put the files themselves there, or choose another folder")
            check(stat.S_ISDIR(kind) or stat.S_ISREG(kind),
                  f"output_dir {folder} holds what is neither a file nor a folder ({inner}); remove it, or choose "
                  "another folder")
        if Path(where) == folder:
            folders[:] = [name for name in folders if name not in foreign]


def _kind(path: Path) -> int:
    """The mode of a path itself; of one that has just gone, that of a file."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return stat.S_IFREG
