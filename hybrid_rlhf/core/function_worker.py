"""Runs a user's code: files, calls, and their errors in one line. It is also the worker process of `*.isolate`, which
does so for another process (rewards/user_code.py).

The process is this file alone: it imports nothing of ours, so that it starts in a tenth of a second. Requests are
pickles and replies are JSON, over a socket. Its arguments: the number of the socket, the id of the process that asks.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from numbers import Real
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

Source = tuple[str, str, str]  # "file" or "module"; its path or name; the dotted name in it

# -- in any process ----------------------------------------------------------------------------------------------------


@contextmanager
def no_second_process(who: str) -> Iterator[None]:
    """A child that the block forks is ended with the block: it would go on as a second trainer in the same folder."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os.write(2, f"warning: {who} forks, and the child has come back from its code; the child is ended\n"
                     .encode("utf-8", "replace"))
            os._exit(1)


def answer_of(who: str, call: Callable[[], Any], run: Callable[[Any], Any] = asyncio.run) -> Any:
    """call(), for `who`. run: of a coroutine; by default tasks that it has started end with it."""
    async def awaited() -> Any:
        return await answer

    with no_second_process(who):
        answer = call()
        return run(awaited()) if inspect.isawaitable(answer) else answer


def run_file(path: str) -> ModuleType:
    """The Python file as a module. Raises what it raises."""
    where = str(Path(path).resolve())
    module = ModuleType(f"reward_functions_{Path(path).stem}")
    module.__file__ = where
    sys.modules[module.__name__] = module  # dataclasses look their module up
    if (folder := str(Path(where).parent)) not in sys.path:
        sys.path.append(folder)  # modules beside the file are found, after all installed ones
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
    """The message of an error, on one line."""
    try:
        return " ".join(str(error).split())[:200]
    except Exception:  # of a user's class
        return "its message cannot be shown"


def parameters_of(function: Callable) -> list | None:
    """[name, kind, whether it has a default] of each parameter; None where the signature is unknown."""
    try:
        return [(p.name, p.kind.name, p.default is not p.empty) for p in
                inspect.signature(function).parameters.values()]
    except Exception:  # ValueError, TypeError, and what a __signature__ of a user's raises
        return None


def text_of(value: object, max_chars: int) -> str:
    """An answer as text for a model (environments/calls.py): complete, or the first max_chars + 1 characters.
    """
    if isinstance(value, str):
        return str.__str__(value)[:max_chars + 1]
    try:
        if isinstance(value, list) and value and all(map(_is_block, value)):
            return "".join(part["text"] if part["type"] == "text" else "(an image, which is not shown)"
                           for part in value)[:max_chars + 1]
        plain = value if isinstance(value, (list, tuple, dict)) else as_json_value(value)
        return (plain if isinstance(plain, str) else _json(plain, max_chars))[:max_chars + 1]
    except Exception as error:  # of a user's class
        return f"(a {type(value).__name__}, which cannot be shown: {type(error).__name__})"


def _is_block(part: object) -> bool:
    """Whether it is a part of a message's content, as in {"type": "text", "text": "..."}."""
    if not isinstance(part, dict):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))


def _json(value: object, max_chars: int) -> str:
    """JSON that ends soon after max_chars characters: the rest of a large table is not written."""
    pieces, length = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, default=as_json_value).iterencode(value):
        pieces.append(piece)
        length += len(piece)
        if length > max_chars:
            break
    return "".join(pieces)


def as_json_value(value: object) -> object:
    """An object that JSON cannot hold as a value that it can, for a model to read."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"({memoryview(value).nbytes} bytes, which are not text)"
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)  # in an order that does not depend on hashes
    return value.tolist() if hasattr(value, "tolist") else str(value)  # numpy's and torch's


# -- in the worker process ---------------------------------------------------------------------------------------------


class _CodeError(Exception):
    """A user's code failed; the message follows its name. is_type_error: whether it raised TypeError."""

    is_type_error = False


class _Worker:
    """Holds modules and instances of a user's classes, and calls them, one call at a time."""

    def __init__(self) -> None:
        self._imported: dict[tuple[str, str], Any] = {}
        self._instances: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()  # it keeps sessions that an environment has opened

    def load(self, sources: Sequence[tuple[str, str]], sys_path: list[str]) -> list:
        """Run the files and import the modules; returns [name, parameters] of the first one's functions."""
        sys.path[:] = sys_path
        with suppress(OSError):  # when memory runs out the system ends this process, not the run
            Path("/proc/self/oom_score_adj").write_text("1000")
        for kind, where in sources:
            try:
                self._imported[kind, where] = run_file(where) if kind == "file" else import_module(where)
            except BaseException as error:
                raise _CodeError(file_error(where, error)) from error
        first = self._imported[sources[0]]
        return [(name, parameters_of(value)) for name, value in vars(first).items() if callable(value)]

    def make(self, number: int, source: Source, options: Mapping[str, Any]) -> None:
        """Construct the instance `number`."""
        factory = self._named(source)
        function = factory.__init__ if inspect.isclass(factory) else factory
        self._instances[number] = self._called("the environment", function, lambda: factory(**options))

    def score(self, who: str, source: Source, named: Mapping[str, Any]) -> object:
        """The answer of a reward function."""
        function = self._named(source)
        scores = self._called(who, function, lambda: function(**named), asyncio.run)
        return _strict(scores.tolist() if hasattr(scores, "tolist") else scores)

    def call(self, who: str, target: Source | tuple[int, str], values: Sequence = (), named: Mapping[str, Any] = {},
             max_chars: int | None = None) -> object:
        """The answer of the function `target`, or of the method of an instance. max_chars: as `text_of` it, if
        given."""
        function = self._named(target) if len(target) == 3 else getattr(self._instances[target[0]], target[1], None)
        if function is None:  # a reset that the class does not have
            return None
        answer = self._called(who, function, lambda: function(*values, **named))
        return _strict(answer) if max_chars is None else text_of(answer, max_chars)

    def _called(self, who: str, function: Callable, call: Callable[[], Any],
                run: Callable[[Any], Any] | None = None) -> Any:
        """run: of a coroutine; by default in the loop of all calls."""
        try:
            return answer_of(who, call, run or self._loop.run_until_complete)
        except BaseException as error:
            failure = _CodeError(call_error(error, function))
            failure.is_type_error = isinstance(error, TypeError)
            raise failure from error

    def _named(self, source: Source) -> Any:
        return attrgetter(source[2])(self._imported[source[:2]])


def _strict(value: Any) -> object:
    """An answer to compute with: numbers, text, None, lists and dicts of them; of others a dict of type and repr, which
    nothing takes for an answer."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, str):  # a member of an Enum
        return str.__str__(value)
    if isinstance(value, Real):
        return float(value)
    if callable(getattr(value, "tolist", None)):  # numpy's and torch's
        with suppress(Exception):  # of more than one number
            return _strict(value.item())
        return _strict(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_strict(each) for each in value]
    if isinstance(value, dict):
        return {str.__str__(key) if isinstance(key, str) else str(key): _strict(each) for key, each in value.items()}
    return {f"a {type(value).__name__}": repr(value)[:1000]}


def serve(connection: Connection) -> None:
    """Answer requests until the other process is gone."""
    worker = _Worker()
    while True:
        operation, seconds, arguments = pickle.loads(connection.recv_bytes())
        if seconds is not None:  # in case the other process is gone by then: also ends a call of compiled code
            signal.setitimer(signal.ITIMER_REAL, seconds + 2)
        try:
            reply = json.dumps({"answer": getattr(worker, operation)(**arguments)})
        except BaseException as error:  # of a user's code, or of what it has answered
            message = str(error) if isinstance(error, _CodeError) else f"gave an unreadable answer: {one_line(error)}"
            reply = json.dumps({"error": message, "is_type_error": getattr(error, "is_type_error", False)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(reply.encode())


def _end_with(parent: int) -> None:
    """End this process with its parent: a function that never returns must not outlive the run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)  # of a session of its own


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, OSError):  # the other process is gone
        os.killpg(0, signal.SIGKILL)
