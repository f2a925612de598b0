"""Writes files and folders of ours atomically, under fresh names.

They get a fresh name beside their target and are renamed at the end, so that no file of the user's is ever taken for a
half-written one of ours.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hybrid_rlhf.core.config import check

_UNFINISHED = ".hybrid_rlhf-"
_IS_UNFINISHED = re.compile(rf"{re.escape(_UNFINISHED)}[0-9a-f]{{16}}")


def fresh_path(folder: Path) -> Path:
    """An unused path in `folder`, for what is renamed when it is complete."""
    return folder / f"{_UNFINISHED}{secrets.token_hex(8)}"


def is_unfinished(name: str) -> bool:
    """Whether `fresh_path` made this name: its file was never finished."""
    return _IS_UNFINISHED.fullmatch(name) is not None


def clear_unfinished(folder: Path) -> None:
    """Remove unfinished files of killed processes from `folder`, to which no other process is writing."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        if is_unfinished(path.name):
            _remove(path)


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """A new empty folder in `folder`, removed at the end of the block unless it was renamed."""
    path = fresh_path(folder)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def replacing(*targets: Path) -> Iterator[list[Path]]:
    """Temporary paths to write files or folders to. They replace `targets` if the block succeeds, and are removed if it
    does not. A target that is a link is replaced itself, not what it leads to."""
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
    """Write a file with `content` (text in UTF-8) atomically and to the disk, in place of an older one. Raises OSError
    where the disk refuses."""
    with replacing(path) as (beside,), beside.open("xb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def put(made: Path, target: Path) -> None:
    """Replace `target`, a folder of ours (if it is there), by the folder `made`."""
    _discard(_exchange(made, target))


def _exchange(made: Path, target: Path) -> list[Path]:
    """Rename the folder `made` to `target`; returns the new path of what had that name before."""
    if not os.path.lexists(target):
        made.rename(target)
        return []
    old = fresh_path(target.parent)
    target.rename(old)  # renamed first: a crash never leaves half of it under its name
    made.rename(target)
    return [old]


def _discard(paths: Collection[Path]) -> None:
    """Remove what has been replaced. What cannot be removed yet (NFS keeps open files) may stay."""
    for path in paths:
        with suppress(OSError):
            _remove(path)


def remove_folder(path: Path) -> None:
    """Remove a folder of ours (or what stands in its place), renamed first."""
    doomed = fresh_path(path.parent)
    path.rename(doomed)
    _remove(doomed)


def _remove(path: Path) -> None:
    """Remove a file, a folder, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def check_inside(folder: Path, foreign: Collection[str] = ()) -> None:
    """UserError for a link below the output folder `folder`, through which we would write or remove elsewhere. foreign:
    folders at its top with files of other programs."""
    for where, folders, files in os.walk(folder):
        for path in (Path(where, name) for name in (*folders, *files)):
            check(not path.is_symlink(),
                  f"output_dir {folder} holds a link ({path.relative_to(folder)}), which leads to files that are not "
                  "the run's; put the files themselves there, or choose another folder")
        if Path(where) == folder:
            folders[:] = [name for name in folders if name not in foreign]


# -- Errors of the system when no file can be written or opened any more -----------------------------------------------


_OPEN_FILES = "raise their number (ulimit -n 65536) or find what leaves files open, such as a reward function"
_ELSEWHERE = "choose another place"
_REMEDIES = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.EFBIG: "make room",
             errno.EROFS: "the disk is read-only: make it writable", errno.EIO: "the disk fails: check it",
             errno.EACCES: f"change its rights, or {_ELSEWHERE}", errno.EPERM: f"change its rights, or {_ELSEWHERE}",
             errno.EMFILE: _OPEN_FILES, errno.ENFILE: _OPEN_FILES,
             **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ESTALE), _ELSEWHERE),
             **dict.fromkeys((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP),
                             f"this file system has no locks: {_ELSEWHERE}")}
_IN_RUST = ("safetensors", "tokenizers")


def refusal(error: BaseException) -> str | None:
    """The system's message, and what to do, where `error` comes from the disk (full, read-only, broken, no right to
    write) or from too many open files. None for any other.

    Libraries written in Rust raise errors of their own, tokenizers a plain Exception, with the system's number in their
    text. No other error's text is searched: it may be about anything.
    """
    number = error.errno if isinstance(error, OSError) else None
    if type(error) is Exception or type(error).__module__.partition(".")[0] in _IN_RUST:
        match = re.search(r"(?:os error |Errno )(\d+)", str(error))
        number = int(match.group(1)) if match else None
    return f"{os.strerror(number)}; {_REMEDIES[number]}" if number in _REMEDIES else None


# -- File locks, which end with the process that holds them, however it ends -------------------------------------------


_LOCK_SECONDS = 0.02  # between two tries to take a lock


def take_lock(path: Path, seconds: float = math.inf) -> BinaryIO:
    """Lock a file (flock), created where it is missing, for one thread of one process; closing it, or the end of the
    process, releases the lock. TimeoutError where another one holds it for `seconds`."""
    file = path.open("ab")
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                file.close()
                raise TimeoutError(f"{path} is locked") from None
            time.sleep(_LOCK_SECONDS)
        else:
            return file


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file. Nothing is created; the lock is shared for an instant, in which
    `take_lock` waits."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # missing, unreadable, on a file system without locks
        pass
    return False
