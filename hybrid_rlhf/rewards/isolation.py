"""Reward functions in a process of their own, which is killed when a call takes too long (reward.isolate)."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from hybrid_rlhf.core import function_worker
from hybrid_rlhf.core.errors import UserError, check, present
from hybrid_rlhf.rewards.deadline import Overdue

_START_SECONDS = 10.0  # a new process has at least: no response is to blame for how long it takes


class CallFailed(Exception):  # noqa: N818 - another one's failure, in words
    """What became of a call in another process, in one line."""


class Foreign:
    """Stands for an answer that stayed in the other process: it is only to be shown."""

    def __init__(self, shown: str) -> None:
        self.shown = shown

    def __repr__(self) -> str:
        return self.shown


class FunctionProcess:
    """A process that holds the functions of a file (kind "file") or of a module; started again after it has ended.

    option: the setting that asks for it, for messages. starter: what it is started by, a thread that lives as long as
    this process; None: the thread that calls.
    """

    def __init__(self, kind: str, where: str, option: str = "reward.functions",
                 starter: Executor | None = None) -> None:
        self.kind, self.where, self.option, self._starter = kind, where, option, starter
        self._process: subprocess.Popen | None = None
        self._connection: Connection

    def start(self, seconds: float | None = None) -> Any:
        """Start it; returns [name, parameters] of a file's functions. UserError where it cannot be run, and Overdue
        where that takes more than `seconds`, if given."""
        here, there = socket.socketpair()
        with there:
            # The system may end a child with the thread that started it: with the process, if that is the main one.
            lives_on = self._starter or threading.current_thread() is threading.main_thread()
            command = [sys.executable, function_worker.__file__, str(there.fileno()), str(os.getpid()),
                       "process" if lives_on else "thread"]
            launch = partial(subprocess.Popen, command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()],
                             start_new_session=True)
            self._process = self._starter.submit(launch).result() if self._starter else launch()
        self._connection = Connection(here.detach())
        weakref.finalize(self, _end, self._process)
        try:
            return self._ask((sys.path, self.kind, self.where), seconds)
        except CallFailed as error:
            what = error if self._process else f"{self.where} {error}"  # the file's error, or the process's end
            raise UserError(f"{self.option}: {what}; fix the file") from None

    @property
    def is_running(self) -> bool:
        """Whether it was started, and nobody has seen it end."""
        return self._process is not None

    def end(self) -> None:
        """End it and what it has started."""
        if self._process is not None:
            self._stop()

    def call(self, request: tuple, seconds: float) -> Any:
        """The answer to (source, function, given, options). Raises Overdue, or CallFailed with what went wrong."""
        if self._process is None:  # it was ended
            limit = max(seconds, _START_SECONDS)
            try:
                self.start(limit)
            except Overdue:
                raise CallFailed(f"ended its process, and {self.where} did not run again in {limit:g} s") from None
        return self._ask(request, seconds)

    def _ask(self, request: tuple, seconds: float | None) -> Any:
        try:
            self._connection.send_bytes(pickle.dumps(request))
            is_answered = self._connection.poll(seconds)
            status, value = json.loads(self._connection.recv_bytes(), object_hook=foreign) if is_answered else ("", "")
        except (EOFError, OSError):
            raise CallFailed(f"ended its process ({self._stop()})") from None
        except BaseException:  # Ctrl-C: an answer that nobody has read would be taken for that to the next request
            self.end()
            raise
        if not is_answered:
            self._stop()
            raise Overdue(f"no answer within {seconds:g} s")
        if status == "error":
            raise CallFailed(value)
        return value

    def _stop(self) -> str:
        """End it and what it has started; returns how it ended."""
        process, self._process = present(self._process, "the process"), None
        self._connection.close()
        _end(process)
        code: int = process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end(process: subprocess.Popen) -> None:
    if process.returncode is None:  # not waited for yet: the number is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def foreign(found: dict) -> Foreign:
    """found: "type" and "shown", as `function_worker.plain` has them."""
    return type(found["type"], (Foreign,), {})(found["shown"])


@dataclass(frozen=True)
class IsolatedFunction:
    """One function of such a process, with the signature that it has there."""

    process: FunctionProcess
    name: str
    __signature__: inspect.Signature

    def __call__(self, source: str, given: dict[str, list], options: dict, seconds: float) -> Any:
        return self.process.call((source, self.name, given, options), seconds)


def functions_of_file(path: str) -> SimpleNamespace:
    """The file's functions by name, in a process of their own. Raises UserError where it cannot be run."""
    process = FunctionProcess("file", path)
    return SimpleNamespace(**{name: IsolatedFunction(process, name, signature_of(parameters))
                              for name, parameters in process.start()})


def signature_of(parameters: list | None) -> inspect.Signature:
    """parameters: as `function_worker.signatures` has them; where they are unknown, the function takes everything."""
    known: list[Any] = [["_", "VAR_KEYWORD", False]] if parameters is None else parameters
    one = inspect.Parameter
    return inspect.Signature([one(name, getattr(one, kind), default=None if has_default else one.empty)
                              for name, kind, has_default in known])


def function_of_module(function: Callable, name: str, processes: dict[str, FunctionProcess]) -> IsolatedFunction:
    """A function that a Python program has given, as another process imports it. UserError where it cannot.

    processes: those of the modules that were opened before, by name; a new one is added.
    """
    module, path = importable(function, name, "reward.isolate", "function")
    if module not in processes:
        processes[module] = FunctionProcess("module", module)
        processes[module].start()
    return IsolatedFunction(processes[module], path, inspect.signature(function))


def importable(given: Callable, name: str, option: str, what: str) -> tuple[str, str]:
    """The module of what a Python program has given, and the dotted name there. UserError where another process cannot
    import it. option, what: the setting and the kind of thing, for the message."""
    module: str = getattr(given, "__module__", None) or "__main__"
    path: str = getattr(given, "__qualname__", "")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    check(module != "__main__" and found is given,
          f"{option}: {name} is no {what} that another process can import; put it into a file of its own and give "
          "path.py:name, or import it from a module")
    return module, path
