"""A file of JSON lines that grows as a run goes on, and is cut back to where a checkpoint was made."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from hybrid_rlhf.core.own_files import no_link


class Lines:
    """Lines appended to `path`. A line that the disk refuses waits for the next one: training goes on, and no line is
    lost or written twice while the process lives. say: is told of the first refusal."""

    def __init__(self, path: str | Path, say: Callable[[str], None], position: int | None = None) -> None:
        self.path, self._say, self._waiting, self._is_refused = path, say, b"", False
        self._file = open(path, "ab", buffering=0, opener=no_link)  # noqa: SIM115 - closed by close()
        size = os.fstat(self._file.fileno()).st_size
        if position is not None and size < position:
            say(f"{path} has lost its end since the checkpoint was made ({size} of {position} bytes); it goes on there")
            position = Path(path).read_bytes().rfind(b"\n") + 1  # a line that was torn would spoil the next one
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
                self._say(f"warning: cannot write to {self.path}: {error.strerror}; its lines wait for room")
            self._is_refused = True

    def sync(self) -> int:
        """The number of bytes written, when all of them are on the disk. OSError while some wait."""
        self._flush()
        if self._waiting:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({Path(self.path).name} waits for room)")
        if os.path.isfile(self.path):  # fsync knows no /dev/null
            os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._flush()
        self._file.close()
