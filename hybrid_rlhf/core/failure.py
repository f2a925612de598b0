"""When one process fails or dies, all end with one message and the same exit code, whatever the others wait for.

A process that waits in a collective for a dead one waits until a timeout of many hours. So a thread of every process
watches the others, its launcher and a key of the launcher's store; a process that fails writes the key.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from hybrid_rlhf.core.peers import Launcher, Peers
from hybrid_rlhf.core.torch_compat import launcher_store

_POLL_SECONDS, _WAIT_SECONDS, _SEARCH_SECONDS = 0.2, 10.0, 1.0
_KEY, _ENDED = "failure", "ended"
_LAUNCHER_DIED = "the launcher has died"
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
