"""File locks, which end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
import math
import time
from pathlib import Path
from typing import BinaryIO

from hybrid_rlhf.core.own_files import no_link

_LOCK_SECONDS = 0.02  # between two tries to take a lock


def take_lock(path: Path, seconds: float = math.inf) -> BinaryIO:
    """Lock a file (flock), created where it is missing, for one thread of one process; closing it, or the end of the
    process, releases the lock. TimeoutError where another one holds it for `seconds`. On a file system without locks
    nothing is locked."""
    file = open(path, "ab", opener=no_link)  # noqa: SIM115 - the caller closes it
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                file.close()
                raise TimeoutError(f"{path} is locked") from None
            time.sleep(_LOCK_SECONDS)
            continue
        except OSError:  # a file system without locks
            pass
        return file


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a file; None where the file system cannot tell. Nothing is created; the lock
    is shared for an instant, in which `take_lock` waits."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
