"""One process at a time in a run's folder: the lock goes with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from hybrid_rlhf.core.config import UserError

_held: dict[Path, int] = {}  # folder -> the open file that bears this process's lock


def claim(folder: Path, name: str) -> None:
    """Lock `folder` by its file `name`, which is made where it is missing. UserError where another process has it.

    OSError where the folder cannot be written; a file system that knows no locks is taken as it is.
    """
    release(folder)
    handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise taken(folder) from None
    except OSError:
        os.close(handle)
        return
    _held[folder.absolute()] = handle


def taken(folder: Path) -> UserError:
    """What a second process is told."""
    return UserError(f"output_dir {folder}: another process is at this run; wait for its end, or choose another "
                     "output_dir")


def release(folder: Path) -> None:
    """Give the lock back, if this process has it."""
    handle = _held.pop(folder.absolute(), None)
    if handle is not None:
        os.close(handle)
