"""What every command sets up: garbage collection until the first step, libraries' warnings, lasting output streams."""

from __future__ import annotations

import errno
import gc
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

_USUAL = gc.get_threshold()


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Until its end or `restore_gc`, collect young objects a hundred thousand at a time, and old ones not at all.

    A start creates modules, functions and classes, which stay. Python's collector traverses all of them again and again
    as they grow: a fifth to a third of the time to the first step.
    """
    gc.set_threshold(100_000, 1_000, 1_000)
    try:
        yield
    finally:
        restore_gc()


def restore_gc() -> None:
    gc.set_threshold(*_USUAL)


# -- Silence deprecation warnings of libraries, and their notes on unused features: the first screen is the run's ------


LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "huggingface_hub", "peft", "torch", "transformers")
# Loggers that report, at import, what unused features lack; features that are asked for are checked by us.
_LOGGERS = ("bitsandbytes", "torch.distributed.elastic.multiprocessing.redirects")
# of peft, on GPT-2's layers, which it then handles correctly; of tqdm, in a notebook without widgets, which are unused
_MESSAGES = ("fan_in_fan_out is set to False but", "IProgress not found")


def quiet_libraries() -> None:
    """Silence, in this process, deprecations inside of libraries and their notes on what is not used here. Warnings of
    any other kind stay, and so do all of them where Python was given a filter (-W, PYTHONWARNINGS)."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    if sys.warnoptions:
        return
    for kind in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind, module=rf"({'|'.join(LIBRARIES)})(\.|$)")
    for text in _MESSAGES:
        warnings.filterwarnings("ignore", message=text)


def _is_news(record: logging.LogRecord) -> bool:
    """Drops the message that there is no accelerator: the run says on what it computes. (DeepSpeed sets its level at
    import.)"""
    return "Setting accelerator to CPU" not in record.getMessage()


# -- stdout and stderr that raise no error when their reader is gone: a closed pipe or terminal, a full disk -----------


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
