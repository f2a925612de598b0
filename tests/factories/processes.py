"""Several processes on this machine by torchrun: started, waited for, and ended."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port() -> str:
    """A port that is bound later, by another process: one that Linux gives to nobody who asks for any."""
    while True:
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return str(free.getsockname()[1])


def launch(*command: str, folder: Path = ROOT) -> subprocess.Popen:
    """Two processes on this machine by torchrun."""
    return start([*TORCHRUN, "--nproc_per_node", "2", "--master_port", free_port(), *command], folder)


def start(words: list[str], folder: Path = ROOT, **env: str) -> subprocess.Popen:
    """One thread a process: more would outnumber the cores."""
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env})


def ended(started: subprocess.Popen) -> subprocess.CompletedProcess:
    try:
        out, err = started.communicate(timeout=420)
    except subprocess.TimeoutExpired:
        started.terminate()  # the launcher ends its processes; killed, it would leave them
        out, err = started.communicate(timeout=60)
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)
