"""stdout and stderr that raise no error when their reader is gone: a closed pipe, a closed terminal, a full disk."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_PASSES = (errno.ENOSPC, errno.EDQUOT)  # there may be room again for what comes later


class _Lasting(io.FileIO):
    """A file descriptor that accepts whatever is written to it. After an error it leads to /dev/null, also for
    libraries and child processes that write to the descriptor itself."""

    def write(self, data: Any) -> int:  # of any kind of buffer
        try:
            number = super().write(data)
            return len(data) if number is None else number  # None: a full pipe that does not wait
        except OSError as error:
            if error.errno not in _PASSES:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
            return len(data)


@contextmanager
def lasting_streams(*names: str) -> Iterator[None]:
    """Within the block nothing that is written to sys.stdout and sys.stderr (or those of `names`) raises an error: what
    cannot be written is dropped, and the program goes on. A decorator too."""
    names = names or ("stdout", "stderr")
    before = {name: getattr(sys, name) for name in names}
    ours = {name: _lasting(stream) for name, stream in before.items()}
    for name, stream in ours.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in ours.items():
            with suppress(Exception):  # it may be closed, or of another class
                stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


def _lasting(stream: TextIO) -> TextIO:
    """The same file without errors; a stream that is not a file (a notebook's, a test's) as it is."""
    buffer = getattr(stream, "buffer", None)
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(getattr(buffer, "raw", buffer), io.FileIO):
        return stream
    with suppress(OSError):
        stream.flush()
    at_once = stream.line_buffering or stream.write_through  # `python -u` has the latter alone, and no buffer below it
    return io.TextIOWrapper(io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False)), stream.encoding,
                            stream.errors, line_buffering=at_once, write_through=stream.write_through)
