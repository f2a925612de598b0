"""The files of runs, read with trust in nothing: they may be half written, huge, damaged, replaced or somebody else's.

Whatever cannot be read raises `Unreadable` with one line. No link is followed, nothing is created, and no more is held
in memory than a bound says.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core import strict_json

RECORD, SETTINGS = "run.json", "config.yaml"
METRICS, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
REPORT, PAGE, CHECKPOINTS, MODEL = "report.md", "report.html", "checkpoints", "model"
MAX_LINE = 8 * 2**20  # bytes; a longer line of a file of rows is passed over
_CHUNK, _MARK = 2**20, 64
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe, too, is opened at once, and then refused

Mark = tuple[int, int, int] | None  # inode, bytes and time of change of a file; None where there is none


class Unreadable(Exception):
    """What is wrong with a file, in one line."""


class Checkpoint(NamedTuple):
    """name: below checkpoints/. step: None where the name tells none."""

    name: str
    step: int | None
    bytes: int
    is_best: bool


def mark(path: Path) -> Mark:
    """What changes when a file or folder does."""
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """An ordinary file, open to be read. FileNotFoundError where there is none, Unreadable for anything else."""
    try:
        handle = os.open(path, _FLAGS)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {_words(path, error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Unreadable(f"{path.name} is no file")
        yield handle
    finally:
        os.close(handle)


def _words(path: Path, error: OSError) -> str:
    return "it is a link" if path.is_symlink() else str(error.strerror or error)


def read_bytes(path: Path, most: int) -> bytes:
    """A whole file of at most `most` bytes. Raises FileNotFoundError, and Unreadable for a larger one."""
    parts: list[bytes] = []
    with opened(path) as handle:
        while part := _read(path, handle, min(_CHUNK, most + 1)):
            parts.append(part)
            if sum(map(len, parts)) > most:
                raise Unreadable(f"{path.name} is larger than {most // 2**20 or 1} MiB")
    return b"".join(parts)


def read_text(path: Path, most: int) -> str | None:
    """A whole file as text, what is no UTF-8 made visible; None where there is none. Unreadable as read_bytes."""
    try:
        return read_bytes(path, most).decode("utf-8", "backslashreplace")
    except FileNotFoundError:
        return None


def read_object(path: Path, most: int = 4 * 2**20) -> dict:
    """A JSON file that holds an object. Unreadable for anything else."""
    try:
        found = strict_json.loads(read_bytes(path, most).decode())
    except FileNotFoundError:
        raise Unreadable(f"{path.name} has gone") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is damaged: {strict_json.why(error)}") from None
    if not isinstance(found, dict):
        raise Unreadable(f"{path.name} is damaged: it holds no JSON object")
    return found


def row_of(line: bytes) -> dict | None:
    """A line of a file of rows; None for what is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def last_rows(path: Path, size: int = 256 * 2**10) -> list[dict]:
    """The rows in the last `size` bytes of a file of rows, oldest first; none where there is no file."""
    try:
        with opened(path) as handle:
            end = os.fstat(handle).st_size
            text = _read(path, handle, size, max(0, end - size))
    except FileNotFoundError:
        return []
    lines = text.split(b"\n")
    return [row for line in lines[end > size:] if line and (row := row_of(line)) is not None]


def read_at(path: Path, place: int, most: int) -> bytes:
    """At most `most` bytes from a place in a file. Raises FileNotFoundError, Unreadable."""
    with opened(path) as handle:
        return _read(path, handle, most, place)


def _read(path: Path, handle: int, size: int, place: int | None = None) -> bytes:
    try:
        return os.read(handle, size) if place is None else os.pread(handle, size, place)
    except OSError as error:
        raise Unreadable(f"{path.name} cannot be read: {error.strerror}") from error


class GrowingLines:
    """The lines of a file that grows, each told once. A file that was replaced, cut back (a run that goes on from a
    checkpoint does so) or written anew is told from its beginning. num_bytes: read so far, for tests.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.num_bytes, self.num_too_long = path, 0, 0
        self._seen: Mark = None  # when it was read to its end
        self._inode, self._place, self._before, self._is_within = -1, 0, b"", False

    def update(self, start_over: Callable[[], None], take: Callable[[int, bytes], None], most: int) -> bool:
        """`take` each new line and where it begins, after `start_over` where all is new; a last line without its end
        waits. Reads about `most` bytes; returns whether that was to the end. Raises Unreadable."""
        now = mark(self.path)
        if now == self._seen and now is not None:
            return True
        try:
            with opened(self.path) as handle:
                self._check(handle, start_over)
                is_done = self._read_on(handle, take, most)
        except FileNotFoundError:
            self._forget(start_over)
            return True
        self._seen = now if is_done else None
        return is_done

    def _check(self, handle: int, start_over: Callable[[], None]) -> None:
        found = os.fstat(handle)
        is_same = found.st_ino == self._inode and found.st_size >= self._place and \
            _read(self.path, handle, len(self._before), self._place - len(self._before)) == self._before
        if not is_same:
            self._forget(start_over)
            self._inode = found.st_ino

    def _forget(self, start_over: Callable[[], None]) -> None:
        if self._place or self._inode != -1:
            start_over()
        self._inode, self._place, self._before, self._is_within, self._seen = -1, 0, b"", False, None
        self.num_too_long = 0

    def _read_on(self, handle: int, take: Callable[[int, bytes], None], most: int) -> bool:
        rest, place, end = b"", self._place, self._place + most
        while place + len(rest) < end:
            part = _read(self.path, handle, _CHUNK, place + len(rest))
            if not part:
                return True
            self.num_bytes += len(part)
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if self._is_within:  # the end of a line that was too long
                    self._is_within = False
                else:
                    take(place, line)
                place += len(line) + 1
            if len(rest) > MAX_LINE:
                self.num_too_long += not self._is_within
                self._is_within, place, rest = True, place + len(rest), b""
            self._place = place
            self._before = _read(self.path, handle, min(_MARK, place), place - min(_MARK, place))
        return place + len(rest) >= os.fstat(handle).st_size


def is_held(folder: Path) -> bool | None:
    """Whether a process is at the run in `folder` (run/lock.py); None where that cannot be found out. Nothing is
    created; a lock that was free is ours for the instant between two calls of the system."""
    try:
        handle = os.open(folder / SETTINGS, _FLAGS)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system that knows no locks
        return None
    finally:
        os.close(handle)  # gives it back
    return False


def size_of(folder: Path, most: int = 20_000) -> int:
    """Bytes of all files below `folder`, of `most` entries at most; links count as nothing."""
    total, left, waiting = 0, most, [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                left -= 1
                if left < 0:
                    return total
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def checkpoints(folder: Path, most: int = 1000) -> list[Checkpoint]:
    """The checkpoints of the run in `folder`, oldest first, the best ones last. One that is being written has no name
    yet; whether each byte is right is asked by who loads it."""
    found = []
    for place, is_best in ((folder / CHECKPOINTS, False), (folder / CHECKPOINTS / "best", True)):
        for path in subfolders(place)[:most]:
            step = path.name.removeprefix("step-")
            if path.name.startswith("step-") and step.isascii() and step.isdigit() and len(step) < 16:
                name = f"best/{path.name}" if is_best else path.name
                found.append(Checkpoint(name, int(step), size_of(path), is_best))
    return found


def subfolders(folder: Path) -> list[Path]:
    """By name, without links and what cannot be read."""
    if not is_folder(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            return sorted(folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def has_model(folder: Path) -> bool:
    """Whether the run has left a model, all of it or an adapter."""
    inner = folder / MODEL
    return is_folder(inner) and any(is_file(inner / name) for name in ("config.json", "adapter_config.json"))


def is_folder(path: Path) -> bool:
    """A folder itself, no link to one."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """An ordinary file itself, no link to one."""
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except (OSError, ValueError):
        return 0
