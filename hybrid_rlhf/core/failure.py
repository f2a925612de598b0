"""When one process fails or dies, all end with one message and the same exit code, whatever the others wait for.

A process that waits in a collective for a dead one waits until a timeout of many hours. So a thread of every process
watches the others, its launcher and a key of the launcher's store; a process that fails writes the key.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from hybrid_rlhf.core.distributed import (
    init_process_group,
    is_initialized,
    is_main,
    rank,
    stand_in_for_main,
    world_size,
)
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.torch_compat import launcher_store

_POLL_SECONDS, _WAIT_SECONDS, _SEARCH_SECONDS = 0.2, 10.0, 1.0
_KEY, _ENDED = "failure", "ended"
_LAUNCHER_DIED = "the launcher has died"
# Seconds between a process's heartbeats, and of silence until it counts as lost: the only way to notice one on another
# host.
_BEAT_SECONDS, SILENT_SECONDS = 10.0, 600.0
# Set by launchers that wait for their processes: torchrun and accelerate, deepspeed. Any other parent may leave first.
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "CROSS_SIZE")
_callbacks: list[Callable[[str], None]] = []
_ending = threading.Lock()  # taken once, by the thread that ends the process
_store: dist.Store | None = None
_peers: Peers | None = None
_left = threading.Event()  # set when the interpreter ends, which waits for the watching thread


def join() -> None:
    """Join the processes of the launcher, if there are several, and watch for the failure of any."""
    global _store, _peers
    if world_size() == 1 or _store is not None:
        return
    launcher = Launcher()
    init_process_group()
    _store, _peers = _connection(), Peers(_connection())
    watching = threading.Thread(target=_watch, args=(_connection(), _peers, launcher), daemon=True)
    watching.start()
    atexit.register(_leave, watching)


def _connection() -> dist.Store:
    """A connection to the launcher's store; one for each thread, as they would block each other's."""
    return dist.PrefixStore("hybrid_rlhf", launcher_store())


def _leave(watching: threading.Thread) -> None:
    """End the thread before the interpreter: one that comes back from C++ into an interpreter that is gone is unwound
    through code that must not throw, and the process aborts at the end of a run that succeeded."""
    _left.set()
    watching.join(_WAIT_SECONDS)
    with suppress(RuntimeError):  # the store is gone: no process needs the message
        present(_peers, "the other processes").leave()


@contextmanager
def on_failure(callback: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, `callback(message)` is called in the main process if another one fails."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def fail(code: int, message: str) -> int:
    """End with `code` after `message` on stderr. Several processes: all end, and this does not return."""
    if world_size() == 1 or not is_initialized() or _store is None:
        if is_main():
            print(message, file=sys.stderr)
        return code
    with _ending:
        try:
            _print(message)
            # Without the store the launcher, or the main process, has gone too, and all find out.
            with suppress(RuntimeError):
                is_alone = bool(present(_peers, "the other processes").dead())
                if _store.add("failures", 1) == 1:
                    _store.set(_KEY, json.dumps({"code": code, "message": message, "is_lost": is_alone}))
                if not is_alone:
                    _wait_for_others(_store)
        finally:
            _exit(code)
    return code


def lost_process(error: BaseException) -> str | None:
    """One line where `error`, of a collective, comes from a process that has died or failed; else None."""
    if _peers is None or _store is None or not isinstance(error, RuntimeError):
        return None
    with suppress(RuntimeError):  # the store has gone
        if _store.check([_KEY]):
            return json.loads(_store.get(_KEY))["message"]
    deadline = time.monotonic() + _SEARCH_SECONDS
    while not (dead := _peers.dead()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return _death(dead) if dead else None


def _death(dead: list[int]) -> str:
    return _loss(dead, "has died (killed, or out of memory)")


def _loss(lost: list[int], what: str) -> str:
    """The message. If the main process is among the lost, the first of the others takes its place."""
    if 0 in lost and rank() == min(set(range(world_size())) - set(lost)):
        stand_in_for_main()
    return f"error: process {lost[0]} {what}; the same command goes on from the last checkpoint"


def _watch(store: dist.Store, peers: Peers, launcher: Launcher) -> None:
    """End this process when another has failed or died; ask it to end when the launcher has died."""
    while not _left.wait(_POLL_SECONDS):
        if launcher.has_died():
            _stop()
            return
        try:
            if store.check([_KEY]):
                notice = json.loads(store.get(_KEY))
            else:
                peers.meet()
                dead, silent = peers.dead(), peers.silent()
                if not dead and not silent:
                    continue
                lost = _death(dead) if dead else _loss(silent, "gives no sign of life (stopped, or its host is gone)")
                notice = {"code": 1, "message": lost, "is_lost": True}
                store.set(_KEY, json.dumps(notice))
        except OSError:  # too many open files, say: not known this time
            continue
        except (RuntimeError, ValueError):  # the store is gone
            if launcher.holds_store:
                _stop()
            return
        with _ending:
            try:
                _call_back(notice["message"])
                _print(notice["message"])
                if not notice["is_lost"]:
                    with suppress(RuntimeError):  # the store is gone: there is no process to wait for
                        _wait_for_others(store)
            finally:  # a process that only waits would stay for ever
                _exit(notice["code"])
    if launcher.has_died():  # another process saw it first, and this one was stopped before the thread looked
        _print(_LAUNCHER_DIED)


def _call_back(message: str) -> None:
    for callback in list(_callbacks) if is_main() else ():
        with suppress(Exception):  # the failure counts, not an error of its callback
            callback(message)


def _stop() -> None:
    """End this process as by SIGTERM: the launcher has died and can no longer end it."""
    _print(_LAUNCHER_DIED)
    os.kill(os.getpid(), signal.SIGTERM)


def _print(message: str) -> None:
    if is_main():  # the others have closed their stderr; also one that stands in for it
        with suppress(Exception):  # a stream that is closed, or of another class: nowhere to print
            print(message, file=sys.stderr if rank() == 0 else sys.__stderr__)


def _wait_for_others(store: dist.Store) -> None:
    """Exit together: else a launcher kills the slower processes, and their exit code is a signal's."""
    count, deadline = store.add(_ENDED, 1), time.monotonic() + _WAIT_SECONDS
    while count < world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
        count = store.add(_ENDED, 0)


def _exit(code: int) -> NoReturn:
    """Exit without cleaning up: other threads may be inside a collective that never ends."""
    try:
        for stream in (sys.stdout, sys.stderr, sys.__stderr__):
            with suppress(Exception):  # a terminal that has gone, a stream that is closed
                if stream:
                    stream.flush()
    finally:
        os._exit(code)


# -- the other processes, as far as this host can see, and the launcher ------------------------------------------------


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
