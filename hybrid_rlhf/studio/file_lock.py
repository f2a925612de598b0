"""Locks on files that go with their process, however it ends. A child that is given the open file has the lock too."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # of this process: what is looked at may be as it should


def take(path: Path) -> int | None:
    """The open file with the lock, to be closed by os.close; None where another process or thread has it.

    A file system that knows no locks is taken as it is. OSError where the file cannot be made.
    """
    handle = _opened(path)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass
    return handle


def is_held(path: Path) -> bool:
    """Whether some process has the lock; False too on a file system without locks. OSError where this process is short
    of what it takes to look."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """The block is run by one thread of one process at a time. OSError where the file cannot be made."""
    handle = _opened(path)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
