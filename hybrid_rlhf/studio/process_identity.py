"""Which process is meant: a number alone is not enough, as one that has ended leaves its number to a stranger.

On Linux a process is told by its number, the tick of the clock at which it began (/proc/PID/stat), and the boot and
namespace in which both count. Elsewhere (macOS, BSD) ps says when it began, to the second.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def identity(pid: int) -> dict | None:
    """Of the process that has this number now, for JSON: {"pid", "began", "where"}; None where there is none. OSError
    where nobody can tell: out of file descriptors, no ps."""
    began = _began(pid)
    return None if began is None else {"pid": pid, "began": began, "where": _where()}


def is_alive(known: object) -> bool:
    """Whether the very process that `identity` described is still there. known: out of a file, so it may be anything;
    what was noted on another machine, or before a restart of this one, is not."""
    if not isinstance(known, Mapping) or not _is_number(known.get("pid")):
        return False
    return bool(known.get("began")) and identity(known["pid"]) == dict(known)


def send(known: object, number: int) -> bool:
    """The signal to that very process; False where it is there no more. Never to another one."""
    if not isinstance(known, Mapping) or not _is_number(known.get("pid")):
        return False
    handle = None
    with suppress(OSError, AttributeError):  # Linux has it: who is looked at below is who gets the signal
        handle = os.pidfd_open(known["pid"])
    try:
        if not is_alive(known):
            return False
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
        else:
            os.kill(known["pid"], number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def _is_number(pid: object) -> bool:
    """Of a process: 0, 1 and negative numbers mean groups, or all."""
    return isinstance(pid, int) and not isinstance(pid, bool) and 1 < pid < 2**31


def _began(pid: int) -> str | None:
    """When the process began; None for one that has ended, even if its parent has not yet asked how."""
    if not _PROC.joinpath("self", "stat").exists():
        return _began_by_ps(pid)
    try:
        fields = _PROC.joinpath(str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _began_by_ps(pid: int) -> str | None:
    """"Mon Nov 23 14:00:07 2026", in UTC and English whatever the user's settings."""
    done = subprocess.run(["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True,
                          timeout=10, check=False, env={**os.environ, "LC_ALL": "C", "TZ": "UTC"})
    found = done.stdout.split(None, 1)
    return found[1].strip() if len(found) == 2 and not found[0].startswith("Z") else None


def _where() -> str:
    """What numbers and ticks count in: this boot of this machine, and the namespace; "" where began is a date."""
    try:
        boot = _PROC.joinpath("sys", "kernel", "random", "boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self' / 'ns' / 'pid')}"
    except OSError:
        return ""
