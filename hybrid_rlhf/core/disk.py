"""Errors of the system when no file can be written or opened any more."""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

_OPEN_FILES = "raise their number (ulimit -n 65536) or find what leaves files open, such as a reward function"
_REMEDIES = {errno.ENOSPC: "make room", errno.EDQUOT: "make room", errno.EFBIG: "make room",
             errno.EROFS: "the disk is read-only: make it writable", errno.EIO: "the disk fails: check it",
             errno.EMFILE: _OPEN_FILES, errno.ENFILE: _OPEN_FILES}
_IN_RUST = ("safetensors", "tokenizers")
_IN_GLOO = "[enforce fail at "  # the beginning of errors of torch's C++ that end with the system's message


class Refusal(NamedTuple):
    """words: the system's message. remedy: what to do."""

    words: str
    remedy: str


def refusal(error: BaseException | str) -> Refusal | None:
    """The system's message where `error` (or the last line of a process) comes from the disk (full, read-only, broken)
    or from too many open files. None for any other.

    Libraries written in Rust raise errors of their own, tokenizers a plain Exception, with the system's number in their
    text, gloo in C++ one with its message. No other error's text is searched: it may be about anything.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, str) or type(error) is Exception or type(error).__module__.partition(".")[0] in _IN_RUST:
        match = re.search(r"(?:os error |Errno )(\d+)", str(error))
        number = int(match.group(1)) if match else None
    if isinstance(error, RuntimeError) and str(error).startswith(_IN_GLOO):
        number = next((n for n in _REMEDIES if str(error).splitlines()[0].endswith(os.strerror(n))), None)
    return Refusal(os.strerror(number), _REMEDIES[number]) if number in _REMEDIES else None
