"""Lock of a run's folder, for one process at a time; released when the process ends, however that is."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.file_lock import take_lock

_locks: dict[Path, BinaryIO] = {}  # folder -> the open file with this process's lock


def claim(folder: Path, name: str) -> None:
    """Lock `folder` by its file `name`, which is created where it is missing. UserError where another process has it.

    OSError where the folder cannot be written; on a file system without locks nothing is locked.
    """
    release(folder)
    try:
        _locks[folder.absolute()] = take_lock(folder / name, 0)
    except TimeoutError:
        raise taken(folder) from None


def taken(folder: Path) -> UserError:
    """The error of a second process."""
    return UserError(f"output_dir {folder}: another process is at this run; wait for its end, or choose another "
                     "output_dir")


def release(folder: Path) -> None:
    """Release the lock, if this process has it."""
    file = _locks.pop(folder.absolute(), None)
    if file is not None:
        file.close()
