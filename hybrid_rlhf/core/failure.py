"""One process fails: all end, with one message and the same exit code, whatever the others are waiting for.

A process that waits in a collective for one that is gone waits until a timeout of many minutes. So every process
watches a key of the launcher's store from a thread, and the one that fails writes it.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from hybrid_rlhf.core.distributed import init_process_group, is_initialized, is_main, world_size

_POLL_SECONDS, _WAIT_SECONDS = 0.2, 10.0
_KEY, _ENDED = "failure", "ended"
_callbacks: list[Callable[[str], None]] = []
_ending = threading.Lock()  # taken once, by whichever thread ends the process
_store: dist.Store | None = None
_left = threading.Event()  # set when the interpreter ends, which waits for the watching thread


def join() -> None:
    """Join the processes of the launcher, if there are several, and watch for the failure of any."""
    global _store
    if world_size() == 1 or _store is not None:
        return
    init_process_group()
    opened = dist.distributed_c10d._get_default_store()
    _store = dist.PrefixStore("hybrid_rlhf", opened.clone())
    watching = threading.Thread(target=_watch, args=(dist.PrefixStore("hybrid_rlhf", opened.clone()),), daemon=True)
    watching.start()
    atexit.register(_leave, watching)


def _leave(watching: threading.Thread) -> None:
    """Let the thread end before the interpreter does: one that comes back from C++ into an interpreter that has gone is
    unwound through code that must not throw, and the process aborts at the end of a run that succeeded."""
    _left.set()
    watching.join(_WAIT_SECONDS)


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
        if is_main():
            print(message, file=sys.stderr)
        if _store.add("failures", 1) == 1:
            _store.set(_KEY, json.dumps({"code": code, "message": message}))
        _end(_store, code)
    return code


def _watch(store: dist.Store) -> None:
    """End this process when another has failed."""
    while not _left.wait(_POLL_SECONDS):
        try:
            if not store.check([_KEY]):
                continue
            found = json.loads(store.get(_KEY))
        except (RuntimeError, ValueError):  # the store is gone: so is the launcher
            return
        with _ending:
            if is_main():
                for callback in list(_callbacks):
                    callback(found["message"])
                print(found["message"], file=sys.stderr)
            _end(store, found["code"])


def _end(store: dist.Store, code: int) -> NoReturn:
    """Leave together, or a launcher would kill those that are slower, and their code would be a signal's.

    Without cleaning up: other threads may be inside a collective that never ends.
    """
    count, deadline = store.add(_ENDED, 1), time.monotonic() + _WAIT_SECONDS
    while count < world_size() and time.monotonic() < deadline:
        time.sleep(0.01)
        count = store.add(_ENDED, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
