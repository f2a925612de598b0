"""The watcher of one job: it starts the job's process, passes on what is asked of it, and writes down how it ended.

    python -m hybrid_rlhf.studio.job_process FOLDER LOCK

FOLDER is the job's (job_files.py), LOCK the number of an open file with its lock. Both processes are in sessions of
their own, so that neither a terminal nor a studio that ends takes them along. As the parent, this one alone signals the
process: its number cannot become a stranger's before its exit code was asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.studio import process_identity
from hybrid_rlhf.studio.job_files import END, FACTS, PROCESS, STOP, STOP_NOW, now, read_facts

LOOK_SECONDS, GRACE_SECONDS, TRIES = 0.2, 10.0, 60
_RESERVED = 4096  # bytes on the disk for the exit code: a disk may be full when a run ends, which may be why it ends


def watch(folder: Path) -> None:
    """From the start of the job's process to its end. OSError where the disk has no room for its end: then nothing was
    started."""
    facts = read_facts(folder)
    if facts is None:
        raise ValueError(f"{folder / FACTS} is no job of the studio")
    noted = {"started": now(), "watcher": process_identity.identity(os.getpid()), "process": None}
    _reserve(folder)
    write_file(folder / PROCESS, json.dumps(noted))
    try:
        process = subprocess.Popen(facts["words"], cwd=facts["folder"], stdin=subprocess.DEVNULL,
                                   start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    except (OSError, ValueError) as error:  # the folder is gone; a NUL in a word
        print(f"error: cannot start in {facts['folder']}: {getattr(error, 'strerror', None) or error}", flush=True)
        _conclude(folder, 2)
        return
    with contextlib.suppress(OSError):  # for a studio that finds the process without its watcher
        write_file(folder / PROCESS, json.dumps({**noted, "process": process_identity.identity(process.pid)}))
    _conclude(folder, _wait(folder, process))


def _wait(folder: Path, process: subprocess.Popen) -> int:
    """The exit code. Each request becomes one SIGTERM: at the first a run saves a checkpoint, at the second it ends at
    once; what ends at neither is killed, with all that it has started."""
    asked, deadline = 0, float("inf")
    while process.poll() is None:
        for number, name in enumerate((STOP, STOP_NOW), start=1):
            if asked < number and (folder / name).exists():
                asked = number
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + GRACE_SECONDS if number == 2 else deadline
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)
    return process.returncode


def _reserve(folder: Path) -> None:
    with open(_beside(folder), "wb") as file:
        file.write(b" " * _RESERVED)
        file.flush()
        os.fsync(file.fileno())


def _conclude(folder: Path, rc: int) -> None:
    """end.json, in the room that was kept for it."""
    text = json.dumps({"rc": rc, "finished": now()}).encode().ljust(_RESERVED)

    def write() -> None:
        with open(_beside(folder), "r+b") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(_beside(folder), folder / END)

    for left in reversed(range(TRIES)):
        try:
            write()
            return
        except OSError:
            if not left:
                raise
            time.sleep(1)


def _beside(folder: Path) -> Path:
    return folder / f"{END}.part"


def main(argv: list[str]) -> int:
    folder, lock = Path(argv[0]), int(argv[1])
    os.set_inheritable(lock, False)  # the watcher's alone
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with the process, which hears them itself;
        signal.signal(number, lambda *_: None)  # a handler, as what is ignored would be so in the process too
    try:
        watch(folder)
    except OSError as error:
        print(f"error: the job cannot be started: {error.strerror or error}", flush=True)
        return 75
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
