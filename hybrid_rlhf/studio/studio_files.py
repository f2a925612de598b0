"""The studio's own files, below .studio: folders that lead nowhere else, and readers that trust nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hybrid_rlhf.core.disk import refusal
from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.studio.file_lock import SHORTAGES
from hybrid_rlhf.studio.studio import Refused, Studio

MOST = 2**20  # bytes of a file that is read whole


def own_folder(studio: Studio, name: str) -> Path:
    """.studio/NAME, made where it is missing, for this user alone. Refused where a link or a file is in its place, and
    where it cannot be made."""
    for folder in (studio.home, studio.home / name):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise refused(error, str(folder)) from error
        if hasattr(os, "getuid") and folder.lstat().st_uid not in (os.getuid(), 0):
            raise Refused(409, f"{folder} belongs to another user, who could change what is started; give --outputs a "
                               "folder of your own")
        if folder.is_symlink():
            raise Refused(409, f"{folder} is a link, and leads to files that are not the studio's; remove it")
    return studio.home / name


def refused(error: OSError, what: str) -> Refused:
    """One line for what the system would not do with `what`: 507 where the disk is full or fails."""
    found = refusal(error)
    if found is None:
        return Refused(500, f"{what}: {error.strerror or error}")
    return Refused(507, f"{what}: {found.words}; {found.remedy}")


def read_bytes(path: Path, start: int = 0, most: int = MOST) -> bytes | None:
    """At most `most` bytes from `start` of a plain file; None for a link, a pipe, or what cannot be read. OSError where
    this process has no file or memory left to look."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return None
    try:
        return os.pread(handle, most, start) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except OSError:
        return None
    finally:
        os.close(handle)


def read_json(path: Path) -> dict | None:
    """A JSON object of at most MOST bytes; None for anything else."""
    try:
        found = loads((read_bytes(path, most=MOST + 1) or b"")[:MOST].decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
