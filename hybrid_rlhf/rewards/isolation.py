"""The worker process that runs a user's code and is killed when a call takes too long (reward.isolate and
environment.isolate). Its code is core/function_worker.py."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

from hybrid_rlhf.core import function_worker
from hybrid_rlhf.core.errors import UserError, check, present
from hybrid_rlhf.rewards.user_code import Overdue

_LATE = "whose time was up"
START_SECONDS = 600.0  # to run a file again, or construct an instance: it does not count against a call


class CallFailed(Exception):  # noqa: N818 - the failure of another process's code
    """A call in a worker process failed; the message is one line that follows the function's name."""

    def __init__(self, what: str, is_type_error: bool = False) -> None:
        super().__init__(what)
        self.is_type_error = is_type_error


class WorkerProcess:
    """A process that runs a user's files and modules; one call at a time.

    sources: ("file", path) or ("module", name) of each. option: the setting that asks for it, for messages.
    generation: how often it was started. how_it_ended: why it no longer runs.
    """

    def __init__(self, sources: Sequence[tuple[str, str]], option: str) -> None:
        self.generation, self.how_it_ended = 0, "its process has ended"
        self._sources, self._option = list(sources), option
        self._process: subprocess.Popen | None = None
        self._connection: Connection

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._process is not None

    def start(self, seconds: float | None = None) -> list:
        """Start it; returns [name, parameters] of the first source's functions. Raises UserError if the code cannot be
        run, and Overdue if that takes more than `seconds`, if given."""
        here, there = socket.socketpair()
        with there:
            self._process = subprocess.Popen(
                [sys.executable, function_worker.__file__, str(there.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, pass_fds=[there.fileno()], start_new_session=True)
        self._connection = Connection(here.detach())
        self.generation += 1
        weakref.finalize(self, _end, self._process)
        try:
            return self._ask("load", seconds, sources=self._sources, sys_path=sys.path)
        except CallFailed as error:
            what = error if self.is_running else f"{self._sources[0][1]} {error}"  # the file's error, or the process's
            self.end()
            raise UserError(f"{self._option}: {what}; fix the file") from None

    def ask(self, operation: str, seconds: float, **arguments: Any) -> Any:
        """Run an operation of `function_worker._Worker`. Raises Overdue, or CallFailed with the reason."""
        if not self.is_running:
            try:
                self.start(START_SECONDS)
            except Overdue:
                raise CallFailed(f"ended its process, and {self._sources[0][1]} did not run again in "
                                 f"{START_SECONDS:g} s") from None
        return self._ask(operation, seconds, **arguments)

    def end(self) -> str:
        """Kill its process group; returns how it ended."""
        if self._process is None:
            return self.how_it_ended
        process, self._process = self._process, None
        self._connection.close()
        _end(process)
        code = present(process.returncode, "the exit code")
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _ask(self, operation: str, seconds: float | None, **arguments: Any) -> Any:
        began, request = time.monotonic(), pickle.dumps((operation, seconds, arguments))
        try:
            self._connection.send_bytes(request)
            is_answered = self._connection.poll(seconds)
            reply = json.loads(self._connection.recv_bytes()) if is_answered else None
        except (EOFError, OSError):
            how = self.end()
            if how == "SIGALRM" and seconds is not None and time.monotonic() - began > seconds:  # of its own timer
                self._end_early(_LATE)
                raise Overdue(f"no answer within {seconds:g} s") from None
            what = f"ended its process ({how})"
            self.how_it_ended = f"an earlier call {what}"
            raise CallFailed(what) from None
        except BaseException as error:  # an unread answer would be taken for that to the next request
            is_late = not isinstance(error, KeyboardInterrupt)  # by the clock of environments/calls.py
            self._end_early(_LATE if is_late else "which was interrupted")
            raise
        if reply is None:
            self._end_early(_LATE)
            raise Overdue(f"no answer within {seconds:g} s")
        if "error" in reply:
            raise CallFailed(reply["error"], reply["is_type_error"])
        return reply["answer"]

    def _end_early(self, why: str) -> None:
        self.how_it_ended = f"it was ended with an earlier call, {why}"
        self.end()


def _end(process: subprocess.Popen) -> None:
    if process.returncode is None:  # not waited for yet: the process id is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class IsolatedFunction:
    """A reward function in a worker process, with its signature there."""

    process: WorkerProcess
    source: function_worker.Source
    __signature__: inspect.Signature

    def __call__(self, who: str, named: Mapping[str, Any], seconds: float) -> Any:
        return self.process.ask("score", seconds, who=who, source=self.source, named=named)


def functions_of_file(path: str, option: str) -> SimpleNamespace:
    """The file's functions by name, in a process of their own. Raises UserError if it cannot be run."""
    process = WorkerProcess([("file", path)], option)
    return SimpleNamespace(**{name: IsolatedFunction(process, ("file", path, name), signature_of(parameters))
                              for name, parameters in process.start()})


def function_of_module(function: Callable, name: str, processes: dict[str, WorkerProcess]) -> IsolatedFunction:
    """A function from a Python program, as another process imports it. UserError if it cannot be imported.

    processes: the worker processes so far, by module; a new one is added.
    """
    module, path = importable(function, name, "reward.isolate", "function")
    if module not in processes:
        processes[module] = WorkerProcess([("module", module)], "reward.functions")
        processes[module].start()
    return IsolatedFunction(processes[module], ("module", module, path), inspect.signature(function))


def signature_of(parameters: list | None) -> inspect.Signature:
    """parameters: as `function_worker.parameters_of` returns them; None accepts everything."""
    known: list[Any] = [["_", "VAR_KEYWORD", False]] if parameters is None else parameters
    one = inspect.Parameter
    return inspect.Signature([one(name, getattr(one, kind), default=None if has_default else one.empty)
                              for name, kind, has_default in known])


def importable(function: Callable, name: str, option: str, kind: str) -> tuple[str, str]:
    """The module of a function or class from a Python program, and its dotted name there. UserError if another process
    cannot import it. option, kind: the setting and the kind of thing, for the message."""
    module: str = getattr(function, "__module__", None) or "__main__"
    path: str = getattr(function, "__qualname__", "")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    check(module != "__main__" and value is function,
          f"{option}: {name} is not a {kind} that another process can import; put it into a file of its own and give "
          "path.py:name, or import it from a module")
    return module, path
