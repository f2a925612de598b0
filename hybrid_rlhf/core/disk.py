"""What the system says when it writes or opens no more files."""

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
_IN_GLOO = "[enforce fail at "  # how the errors of torch's C++ begin whose last words are the system's


class Refusal(NamedTuple):
    """words: the system's. remedy: what there is to do."""

    words: str
    remedy: str


def refusal(error: BaseException | str) -> Refusal | None:
    """What the system says where `error` (or the last line that a process said) is the disk's (full, read-only, broken)
    or there are too many open files. None for any other.

    Libraries written in Rust raise errors of their own, tokenizers a plain Exception, with the system's number in their
    text, gloo in C++ one with its words. No other error's text is searched: it may tell of anything.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, str) or type(error) is Exception or type(error).__module__.partition(".")[0] in _IN_RUST:
        found = re.search(r"(?:os error |Errno )(\d+)", str(error))
        number = int(found.group(1)) if found else None
    if isinstance(error, RuntimeError) and str(error).startswith(_IN_GLOO):
        number = next((n for n in _REMEDIES if str(error).splitlines()[0].endswith(os.strerror(n))), None)
    return Refusal(os.strerror(number), _REMEDIES[number]) if number in _REMEDIES else None
