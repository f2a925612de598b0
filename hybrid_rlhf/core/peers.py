"""The other processes of a run, as far as this host can see: which have died, which are silent; and the launcher."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from hybrid_rlhf.core.distributed import rank, world_size

# Seconds between a process's heartbeats, and of silence until it counts as lost: the only way to notice one on another
# host.
_BEAT_SECONDS, SILENT_SECONDS = 10.0, 600.0
# Set by launchers that wait for their processes: torchrun and accelerate, deepspeed. Any other parent may leave first.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")


class Launcher:
    """The process that started this one, if it is a launcher. holds_store: whether the store of the processes is in its
    memory."""

    def __init__(self) -> None:
        self._number = os.getppid() if any(name in os.environ for name in _LAUNCHED) else None
        self.holds_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def has_died(self) -> bool:
        return self._number is not None and os.getppid() != self._number


class Peers:
    """The processes of this host, by rank. Each writes to the store which process it is, and later that it leaves."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._unknown = store, set(range(world_size())) - {rank()}
        self._processes: dict[int, tuple[int, str]] = {}  # rank -> number of the process, when it began
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> its last sign of life, when it was new here
        self._beats, self._next_beat = 0, 0.0
        process = os.getpid()
        store.set(f"process/{rank()}", json.dumps([_host(), process, _began(process)]))

    def leave(self) -> None:
        self._store.set(f"left/{rank()}", "")

    def meet(self) -> None:
        """Read which processes have written to the store. RuntimeError where the store is gone."""
        for number in sorted(self._unknown):
            if self._store.check([f"process/{number}"]):
                host, process, began = json.loads(self._store.get(f"process/{number}"))
                self._unknown.remove(number)
                if host == _host():
                    self._processes[number] = process, began

    def dead(self) -> list[int]:
        """Ranks of processes that ended without leaving."""
        return [number for number, (process, began) in list(self._processes.items())  # another thread adds to them
                if _began(process) != began and not self._has_left(number)]

    def silent(self) -> list[int]:
        """Send this process's heartbeat, and return the ranks without one for SILENT_SECONDS that have not left:
        stopped, or on a host that is gone. RuntimeError where the store is gone."""
        now = time.monotonic()
        if now < self._next_beat:
            return []
        was_away = now > self._next_beat + SILENT_SECONDS / 2  # this process itself was stopped, and read no heartbeats
        self._beats, self._next_beat = self._beats + 1, now + _BEAT_SECONDS
        self._store.set(f"alive/{rank()}", str(self._beats))
        for number in range(world_size()):
            if number != rank() and self._store.check([f"alive/{number}"]):
                sign = self._store.get(f"alive/{number}")
                if was_away or sign != self._heard.get(number, (b"", 0.0))[0]:
                    self._heard[number] = sign, now
        return [number for number, (_, since) in sorted(self._heard.items())
                if now - since > SILENT_SECONDS and not self._has_left(number)]

    def _has_left(self, number: int) -> bool:
        try:
            return self._store.check([f"left/{number}"])
        except RuntimeError:  # the store is gone, and with it one of the processes
            return False


def _host() -> str:
    """A name for the processes that see each other's ids. Machines made from one image may have the same hostname and
    namespace, but not the same boot id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')} {boot}"
    except OSError:  # not Linux, or a sandbox hides it: no other process is seen
        return f"{socket.gethostname()} {os.getpid()}"


def _began(process: int) -> str | None:
    """When the living process with this id began, in clock ticks: another one may have the id later. None for a dead
    one, whose parent may not have waited for it yet."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
