"""Where the runs are: the folders below the outputs that hold a run.json, found again quickly while nothing changes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.studio.run_files import CHECKPOINTS, MODEL, RECORD

DEPTH, MAX_FOLDERS, MAX_RUNS, MAX_NOTES = 4, 20_000, 2_000, 20
OWN = frozenset((CHECKPOINTS, MODEL, f"{MODEL}_ema", "plots", "trackers", "rows"))  # a run's own folders
_SETTLED = 2 * 10**9  # ns: a folder that changed later may change once more within one tick of the file system's clock


class _Seen(NamedTuple):
    mark: tuple[int, int]  # inode and time of change
    inner: tuple[str, ...]
    has_run: bool


class RunTree:
    """num_scans: folders that were read so far, for tests; a folder that has not changed is not."""

    def __init__(self, outputs: Path) -> None:
        self.outputs, self.num_scans = outputs, 0
        self._seen: dict[str, _Seen] = {}

    def find(self) -> tuple[list[str], list[str]]:
        """The ids of all runs, and a line for each thing that was left out. Links are not followed, folders whose
        names begin with a dot are passed over, and so is what is more than DEPTH folders down."""
        runs: list[str] = []
        notes: list[str] = []
        seen: dict[str, _Seen] = {}
        waiting = [("", 0)]
        while waiting:
            name, depth = waiting.pop()
            if len(seen) >= MAX_FOLDERS or len(runs) >= MAX_RUNS:
                notes.append(f"there are more than {MAX_RUNS} runs or {MAX_FOLDERS} folders; the others are not shown")
                break
            found = self._look(name, notes)
            if found is None:
                continue
            seen[name] = found
            if found.has_run and name:
                runs.append(name)
            elif found.has_run:
                notes.append("this folder is itself a run; give --outputs the folder above it to see it")
            if depth < DEPTH:
                waiting += [(f"{name}/{each}" if name else each, depth + 1) for each in found.inner
                            if not (found.has_run and name and each in OWN)]
        self._seen = seen
        return runs, notes[:MAX_NOTES]

    def _look(self, name: str, notes: list[str]) -> _Seen | None:
        path = f"{self.outputs}/{name}" if name else str(self.outputs)
        try:
            found = os.lstat(path)
            mark, known = (found.st_ino, found.st_mtime_ns), self._seen.get(name)
            if known is not None and known.mark == mark:
                return known
            inner, has_run = self._scan(path, name, notes)
        except FileNotFoundError:  # it has gone meanwhile
            return None
        except OSError as error:
            notes.append(f"{name or path} cannot be read: {error.strerror}")
            return None
        is_settled = time.time_ns() - found.st_mtime_ns > _SETTLED
        return _Seen(mark if is_settled else (-1, -1), inner, has_run)

    def _scan(self, path: str, name: str, notes: list[str]) -> tuple[tuple[str, ...], bool]:
        self.num_scans += 1
        inner, has_run = [], False
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name == RECORD:
                    has_run = entry.is_file(follow_symlinks=False)
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    if not _is_text(entry.name):
                        notes.append(f"a folder in {name or 'the outputs'} is left out: its name is no UTF-8")
                        continue
                    inner.append(entry.name)
        return tuple(sorted(inner, reverse=True)), has_run


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
