"""A call of a reward function, and the process that makes calls for another one (reward.isolate, environment.isolate).

As a process it is this file alone: it imports nothing of ours, so that it starts in a tenth of a second. Requests are
pickles and replies are JSON, over a socket. Its arguments: the socket's number, the number of the process that starts
it, and what must not be outlived: that "process", or the "thread" of it that started this one.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def call(name: str, function: Callable, given: dict[str, list], options: dict) -> Any:
    """What `function` answers; a tensor's or an array's numbers as lists. name: of the source, for messages."""
    with no_second_process(f"reward source {name}"):
        answer = function(**given, **options)
        answer = asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer
        return answer.tolist() if hasattr(answer, "tolist") else answer


async def _awaited(answer: Awaitable[Any]) -> Any:
    return await answer


@contextmanager
def no_second_process(who: str) -> Iterator[None]:
    """A child that the block forks ends with the block: it would go on as a second trainer in the same folder."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os.write(2, f"warning: {who} forks, and the child has come back from its code; the child is ended\n"
                     .encode("utf-8", "replace"))
            os._exit(1)


def run_file(path: str) -> ModuleType:
    """The Python file as a module. Raises what it raises."""
    where = str(Path(path).resolve())
    module = ModuleType(f"reward_functions_{Path(path).stem}")
    module.__file__ = where
    sys.modules[module.__name__] = module  # dataclasses look their module up
    if (folder := str(Path(where).parent)) not in sys.path:
        sys.path.append(folder)  # what lies beside the file is found, behind all that is installed
    with no_second_process(path):
        exec(compile(Path(path).read_text(encoding="utf-8"), where, "exec"), vars(module))
    return module


def file_error(path: str, error: BaseException) -> str:
    """Why `run_file` failed, in one line, with the line of the file."""
    where = str(Path(path).resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == where]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{path}{f' line {line}' if line else ''} cannot be run: {type(error).__name__}: {one_line(error)}"


def call_error(error: BaseException, function: Callable) -> str:
    """What a function raised, in one line, with the line of its own file."""
    code: CodeType | None = getattr(inspect.unwrap(function), "__code__", None)
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
    where = f" ({Path(code.co_filename).name} line {lines[-1]})" if code and lines else ""
    return f"raised {type(error).__name__}: {one_line(error)}{where}"


def one_line(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:200]
    except Exception:  # of someone else's class
        return "its message cannot be shown"


def signatures(module: ModuleType) -> list[tuple[str, list | None]]:
    """Each function's name and [name, kind, whether it has a default] of its parameters; None where nobody knows."""
    return [(name, parameters_of(value)) for name, value in vars(module).items() if callable(value)]


def parameters_of(function: Callable) -> list | None:
    try:
        return [(p.name, p.kind.name, p.default is not p.empty) for p in
                inspect.signature(function).parameters.values()]
    except (ValueError, TypeError):
        return None


def plain(value: Any) -> object:
    """An answer as JSON; {"shown", "type"} for what is no number, text or None, and is only to be shown."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if callable(getattr(value, "numel", None)) and value.numel() == 1:  # torch's
        return plain(value.item())
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(each) for each in value]
    return float(value) if isinstance(value, Real) else {"shown": repr(value), "type": type(value).__name__}


def serve(connection: Connection) -> None:
    """Do what is asked until nobody asks any more. The first request says where the functions are."""
    sys.path[:], kind, where = pickle.loads(connection.recv_bytes())
    known: Any = None
    reply: tuple[str, object]
    try:
        known = run_file(where) if kind == "file" else import_module(where)
        reply = "ok", signatures(known) if kind == "file" else []
    except BaseException as error:
        reply = "error", file_error(where, error)
    while True:
        connection.send_bytes(json.dumps(reply).encode())
        source, name, given, options = pickle.loads(connection.recv_bytes())
        function = known
        for part in name.split("."):
            function = getattr(function, part)
        try:
            reply = "ok", plain(call(source, function, given, options))
        except BaseException as error:
            reply = "error", call_error(error, function)


def _end_with(parent: int, starter: str) -> None:
    """Nobody is left to ask: a function that never returns must not outlive the run.

    Linux ends this process itself, in the midst of a regular expression too, where no thread gets a turn. It does so
    when the thread that started it ends, so only where that is the other process's main one; else a thread watches.
    """
    if not (starter == "process" and _system_ends_this()):
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    elif os.getppid() != parent:  # it had ended before
        os._exit(0)


def _system_ends_this() -> bool:
    """Ask Linux for SIGKILL when the thread that started this process ends; returns whether it will."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL)) == 0
    except (OSError, AttributeError):  # a C library without it
        return False


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)  # of a session of its own


if __name__ == "__main__":
    _end_with(int(sys.argv[2]), sys.argv[3])
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the other process has gone
        os._exit(0)
