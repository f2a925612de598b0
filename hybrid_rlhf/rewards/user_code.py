"""Calls of a user's code: in this process, with a timeout, and with its state restored after them; or (reward.isolate,
environment.isolate) in a worker process, core/function_worker.py, that is killed when a call takes too long."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from hybrid_rlhf.core import function_worker, random_state
from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.errors import UserError, check, present

T = TypeVar("T")

_EVERY = 0.1  # seconds between two signals
_log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()  # (who, setting)
_LATE = "whose time was up"
START_SECONDS = 600.0  # to run a file again, or construct an instance: it does not count against a call


# -- the timeout -------------------------------------------------------------------------------------------------------


class Overdue(TimeoutError):
    """A call exceeded its timeout."""


class _Expired(BaseException):
    """Raised inside the call. Not an Exception: `except Exception` in the called code must not swallow it."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """`call()`, or Overdue after `seconds` of wall time. What it raises is raised here.

    In the main thread a timer signal (SIGALRM) interrupts the call, even inside a regular expression, and repeats for
    code that catches every exception. A call that installs its own handler of SIGALRM loses this protection meanwhile;
    if it returns too late, it is Overdue all the same. Elsewhere the call runs in a thread of its own, which is
    abandoned at the timeout.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer") and not _has_loop():
        return _alarmed(seconds, call)
    return _beside(seconds, call)


def _has_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook: a second one cannot run there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _alarmed(seconds: float, call: Callable[[], T]) -> T:
    here, began, is_over = inspect.currentframe(), time.monotonic(), False
    answers: list[T] = []
    errors: list[BaseException] = []

    def expire(_number: int, frame: FrameType | None) -> None:
        if not (is_over or frame is None or frame is here):  # code of the call was interrupted
            raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    waiting = signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
    try:
        answers.append(call())
    except BaseException as error:
        errors.append(error)
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, *waiting)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began > seconds and not any(isinstance(error, KeyboardInterrupt) for error in errors):
        raise Overdue(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]


def _beside(seconds: float, call: Callable[[], T]) -> T:
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Overdue(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]


# -- torch's settings, the working directory, random generators --------------------------------------------------------


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


# setting: (how it is read, how it is set)
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device,
                               lambda d: torch.set_default_device(None if d.type == "cpu" else d)),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda pair: torch.use_deterministic_algorithms(pair[0], warn_only=pair[1])),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (_working_directory, lambda path: os.chdir(path or "."))}


def _reseed_device() -> None:
    place = device()
    torch.cuda.default_generators[place.index].manual_seed(int(torch.randint(2**62, (1,), device=place)))


# generator of random_state: how it goes on from a seed that it draws
_RESEED: dict[str, Callable[[], object]] = {
    "python": lambda: random.seed(random.getrandbits(64)),
    "numpy": lambda: np.random.seed(np.random.randint(2**32, dtype=np.uint32)),
    "torch": lambda: torch.default_generator.manual_seed(int(torch.randint(2**62, (1,)))),
    "device": _reseed_device}


@contextmanager
def unchanged(who: str) -> Iterator[None]:
    """Restore the _SETTINGS after the block, and warn once about each that it has changed.

    A random generator that the block drew from, or seeded, is restored and reseeded by its own next draw: training does
    not repeat the block's draws, and the next block draws other numbers.
    """
    settings, states = {name: read() for name, (read, _) in _SETTINGS.items()}, random_state.state()
    try:
        yield
    finally:
        changed = [name for name, (read, _) in _SETTINGS.items() if read() != settings[name]]
        for name in changed:
            _SETTINGS[name][1](settings[name])
        if new := [name for name in changed if (who, name) not in _warned]:
            _warned.update((who, name) for name in new)
            _log.warning("warning: %s changes %s for the whole process; what it was is restored after each call", who,
                         " and ".join(new))
        for name, state in random_state.state().items():
            if not _is_same(states[name], state):
                random_state.load_state({name: states[name]})
                _RESEED[name]()


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_is_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


# -- the worker process ------------------------------------------------------------------------------------------------


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
