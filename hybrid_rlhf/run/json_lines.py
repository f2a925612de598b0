"""Append-only file of JSON lines, which is truncated to the position of a checkpoint when a run is resumed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.core.own_files import no_link


class Lines:
    """Lines appended to `path`. A line that the disk refuses is retried with the next one: training goes on, and no
    line is lost or written twice while the process lives. warn: gets a message at the first failure."""

    def __init__(self, path: str | Path, warn: Callable[[str], None], position: int | None = None) -> None:
        self.path, self._warn, self._waiting, self._is_refused = path, warn, b"", False
        self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115 - closed by close()
        size = os.fstat(self._file.fileno()).st_size
        if position is not None and size < position:
            warn(f"{path} has lost its end since the checkpoint was made ({size} of {position} bytes); it goes on "
                 "there")
            position = Path(path).read_bytes().rfind(b"\n") + 1  # an incomplete line would corrupt the next
        if position is not None:
            os.truncate(self._file.fileno(), position)

    def write(self, line: str) -> None:
        self._waiting += line.encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting):]
            self._is_refused = False
        except OSError as error:
            if not self._is_refused:
                self._warn(f"warning: cannot write to {self.path}: {error.strerror}; its lines wait for room")
            self._is_refused = True

    def sync(self) -> int:
        """Flush to the disk; returns the number of bytes written. OSError while some lines wait."""
        self._flush()
        if self._waiting:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({Path(self.path).name} waits for room)")
        if os.path.isfile(self.path):  # /dev/null has no fsync
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._flush()
        self._file.close()
