"""One process at a time in a run's folder: the lock goes with the process, however it ends."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.file_lock import take_lock

_held: dict[Path, BinaryIO] = {}  # folder -> the open file that bears this process's lock


def claim(folder: Path, name: str) -> None:
    """Lock `folder` by its file `name`, which is made where it is missing. UserError where another process has it.

    OSError where the folder cannot be written; a file system that knows no locks is taken as it is.
    """
    release(folder)
    try:
        _held[folder.absolute()] = take_lock(folder / name, 0)
    except TimeoutError:
        raise taken(folder) from None


def taken(folder: Path) -> UserError:
    """What a second process is told."""
    return UserError(f"output_dir {folder}: another process is at this run; wait for its end, or choose another "
                     "output_dir")


def release(folder: Path) -> None:
    """Give the lock back, if this process has it."""
    file = _held.pop(folder.absolute(), None)
    if file is not None:
        file.close()
