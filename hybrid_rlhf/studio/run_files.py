"""Read the files of a run's folder while the run may be writing: rows, records, sizes and checkpoints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

RECORD, SETTINGS = "run.json", "config.yaml"
METRICS, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
GROWING = (RECORD, METRICS, SAMPLES, ANSWERS)  # files that change while a run is active
REPORT, PAGE, EVALUATION = "report.md", "report.html", "evaluate.md"
CHECKPOINTS, MODEL = "checkpoints", "model"
_TAIL = 64  # bytes before the read position that identify an unchanged file

Mark = tuple[int, int, int] | None  # inode, size and modification time; None for a missing file


class Checkpoint(NamedTuple):
    """name: its path below checkpoints/."""

    name: str
    step: int
    bytes: int
    is_best: bool


def mark(path: Path) -> Mark:
    """A mark that changes when a file or folder changes."""
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_size, info.st_mtime_ns


def read_text(path: Path) -> str | None:
    """A file as text, with invalid UTF-8 escaped; None if it does not exist."""
    return path.read_text("utf-8", "backslashreplace") if path.exists() else None


def row_of(line: bytes | str) -> dict | None:
    """The row in a JSON line; None for a damaged one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def last_rows(path: Path, size: int = 256 * 2**10) -> list[dict]:
    """The rows in the last `size` bytes of a JSON lines file, oldest first; [] if it does not exist."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        lines = file.read().split(b"\n")
    return [row for line in lines[end > size:] if line and (row := row_of(line)) is not None]


class GrowingLines:
    """Lines of a growing file, each read once. A file that was replaced or truncated, as by a run that resumes from a
    checkpoint, is read again from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: Mark = None  # at the last read
        self._is_whole = False  # whether that reached the end
        self._place, self._tail = 0, b""  # start of the next line, and the bytes before it

    def update(self, start_over: Callable[[], None], take: Callable[[int, bytes], None],
               most: float = math.inf) -> bool:
        """Call `take` with the position of each new line and the line, after `start_over` if the file is another one. A
        partial last line waits. Reads about `most` bytes; returns whether it reached the end."""
        now = mark(self.path)
        if now is not None and now == self._seen and self._is_whole:
            return True
        try:
            with self.path.open("rb") as file:
                file.seek(self._place - len(self._tail))
                if now is None or (self._seen and now[0] != self._seen[0]) or file.read(len(self._tail)) != self._tail:
                    file.seek(0)
                    self._place = 0
                    start_over()
                end, self._is_whole = self._place + most, True
                for line in file:
                    self._is_whole = self._place < end
                    if not (self._is_whole and line.endswith(b"\n")):
                        break
                    take(self._place, line[:-1])
                    self._place += len(line)
                file.seek(max(0, self._place - _TAIL))
                self._tail = file.read(self._place - file.tell())
        except FileNotFoundError:
            self._place, self._tail, self._is_whole = 0, b"", True
            start_over()
        self._seen = now
        return self._is_whole


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`, without links."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                path = Path(where, name)
                total += 0 if path.is_symlink() else path.stat().st_size
    return total


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints of the run in `folder`, oldest first, the best ones last. One that is being written is not
    included."""
    paths = [(path, False) for path in (folder / CHECKPOINTS).glob("step-*")]
    paths += [(path, True) for path in (folder / CHECKPOINTS / "best").glob("step-*")]
    return [Checkpoint(f"best/{path.name}" if is_best else path.name, step_of(path), size_of(path), is_best)
            for path, is_best in sorted(paths, key=lambda pair: (pair[1], pair[0].name))
            if step_of(path) >= 0 and path.is_dir()]


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 without one."""
    number = checkpoint.name.removeprefix("step-")
    return int(number) if number.isascii() and number.isdigit() else -1


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of the run in `folder`."""
    whole = [path for path in (folder / CHECKPOINTS).glob("step-*") if (path / "manifest.json").is_file()]
    return max((path for path in whole if step_of(path) >= 0), key=step_of, default=None)


def has_model(folder: Path) -> bool:
    """Whether the run has saved a model or an adapter."""
    return any((folder / MODEL / name).is_file() for name in ("config.json", "adapter_config.json"))
