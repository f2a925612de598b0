"""The other processes of a run, as far as this host can tell: which have died, which are stopped; and the launcher."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from hybrid_rlhf.core.distributed import rank, world_size

# How often a process says that it is alive, and after how long a silence it counts as lost: one on another host can be
# noticed by nothing else.
_BEAT_SECONDS, SILENT_SECONDS = 10.0, 600.0
# Set by launchers that wait for their processes: torchrun and accelerate, deepspeed. Any other parent may leave first.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")


class Launcher:
    """The process that started this one, if it is a launcher. holds_store: whether the processes meet in its memory."""

    def __init__(self) -> None:
        self._number = os.getppid() if any(name in os.environ for name in _LAUNCHED) else None
        self.holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def has_died(self) -> bool:
        return self._number is not None and os.getppid() != self._number


class Peers:
    """The processes of this host, by rank. Each says in the store which one it is, and later that it leaves."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._unknown = store, set(range(world_size())) - {rank()}
        self._processes: dict[int, tuple[int, str]] = {}  # rank -> number of the process, when it began
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> its last sign of life, when it was new here
        self._beats, self._next_beat = 0, 0.0
        own = os.getpid()
        store.set(f"process/{rank()}", json.dumps([_host(), own, _status(own)[1]]))

    def leave(self) -> None:
        self._store.set(f"left/{rank()}", "")

    def meet(self) -> None:
        """Read who has said who it is. RuntimeError where the store has gone."""
        for number in sorted(self._unknown):
            if self._store.check([f"process/{number}"]):
                host, process, began = json.loads(self._store.get(f"process/{number}"))
                self._unknown.remove(number)
                if host == _host():
                    self._processes[number] = process, began

    def dead(self) -> list[int]:
        """Ranks of processes that ended without leaving."""
        return [number for number, (process, began) in list(self._processes.items())  # another thread adds to them
                if _has_ended(process, began) and not self._has_left(number)]

    def silent(self) -> list[int]:
        """Say that this process is alive, and return the ranks of those that have not said so for SILENT_SECONDS nor
        left: stopped, or on a host that has gone. RuntimeError where the store has gone."""
        now = time.monotonic()
        if now < self._next_beat:
            return []
        was_away = now > self._next_beat + SILENT_SECONDS / 2  # this process itself was stopped, and did not listen
        self._beats, self._next_beat = self._beats + 1, now + _BEAT_SECONDS
        self._store.set(f"alive/{rank()}", str(self._beats))
        for number in range(world_size()):
            if number != rank() and self._store.check([f"alive/{number}"]):
                sign = self._store.get(f"alive/{number}")
                if was_away or sign != self._heard.get(number, (b"", 0.0))[0]:
                    self._heard[number] = sign, now
        return [number for number, (_, since) in sorted(self._heard.items())
                if now - since > SILENT_SECONDS and not self._has_left(number)]

    def stopped(self) -> list[int]:
        """Ranks of processes that a signal or a debugger has stopped."""
        return [number for number, (process, _) in list(self._processes.items()) if _status(process)[0] == "stopped"]

    def _has_left(self, number: int) -> bool:
        try:
            return self._store.check([f"left/{number}"])
        except RuntimeError:  # the store has gone, and with it one of the processes
            return False


def _host() -> str:
    """What processes have in common that see each other's numbers. Machines made from one image may have the name and
    the namespace in common too, and no boot."""
    boot = ""
    with suppress(OSError):  # a sandbox may hide it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:  # no Linux: nobody is seen
        return f"{socket.gethostname()} {os.getpid()} {boot}"


def _has_ended(process: int, began: str) -> bool:
    """Whether the process of this number that began then has: another one may have the number now."""
    status, since = _status(process)
    return status == "dead" or (status != "unknown" and bool(began) and since != began)


def _status(process: int) -> tuple[str, str]:
    """running, stopped, dead or unknown, and when it began, in ticks of the clock ("" where nobody can tell)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "dead", ""
    except OSError:  # out of file descriptors or memory: that is this process's trouble
        return "unknown", ""
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(fields[0], "running"), fields[19]
