"""What a process of environment.isolate does: it holds instances of environments, and calls them and tools.

It is run by core/function_worker.py, and imports neither torch nor transformers, so that it starts in a quarter of a
second. Every function answers {"answer": ...}, or {"error": in words, "kind": of the exception}, as JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

from hybrid_rlhf.core.function_worker import call_error, file_error, no_second_process, one_line, run_file
from hybrid_rlhf.environments.text_of_answers import shown

Source = tuple[str, str, str]  # "file" or "module"; its path or name; the dotted name in it

_modules: dict[tuple[str, str], Any] = {}
_instances: dict[int, Any] = {}
_loop: list[asyncio.AbstractEventLoop] = []  # one for all calls: what an environment has opened in it goes on


def load(sources: Sequence[Source]) -> str:
    """Run the files and import the modules that calls will be for."""
    with suppress(OSError):  # where memory runs out the system ends this process, and not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    for kind, where, _ in sources:
        try:
            _module(kind, where)
        except BaseException as error:
            return json.dumps({"error": file_error(where, error), "kind": "Exception"})
    return json.dumps({"answer": None})


def make(number: int, source: Source, options: Mapping[str, Any], dropped: Sequence[int]) -> str:
    """Construct the instance `number`. dropped: those that nobody will ask for again."""
    for each in dropped:
        _instances.pop(each, None)
    factory = _named(source)
    function = factory.__init__ if inspect.isclass(factory) else factory

    def construct() -> None:
        _instances[number] = factory(**options)

    return _reply(function, construct, carried)


def call(number: int, name: str, values: Sequence[Any], named: Mapping[str, Any], max_chars: int | None) -> str:
    """What a method answers; max_chars: as text that a model is shown. A reset that there is not answers nothing."""
    method = getattr(_instances[number], name, None)
    if method is None:
        return json.dumps({"answer": None})
    return _reply(method, partial(method, *values, **named), _form(max_chars))


def use(source: Source, named: Mapping[str, Any], max_chars: int) -> str:
    """What a plain tool answers, as text that a model is shown."""
    tool = _named(source)
    return _reply(tool, partial(tool, **named), _form(max_chars))


def carried(value: Any) -> Any:
    """`value` in JSON, from which `isolated.restored` makes it again: lists, tuples, dicts, numbers, text and None;
    numbers of numpy and torch as Python's; of others the name of their type and what repr says."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [carried(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[carried(k), carried(v)] for k, v in value.items()]}
    if isinstance(value, str):
        return str.__str__(value)
    with suppress(Exception):
        return carried(value.item())
    return float(value) if isinstance(value, Real) else {"other": [type(value).__name__, repr(value)[:1000]]}


def _form(max_chars: int | None) -> Callable[[Any], Any]:
    return carried if max_chars is None else partial(shown, max_chars=max_chars)


def _module(kind: str, where: str) -> Any:
    if (kind, where) not in _modules:
        _modules[kind, where] = run_file(where) if kind == "file" else import_module(where)
    return _modules[kind, where]


def _named(source: Source) -> Any:
    found = _module(*source[:2])
    for part in source[2].split("."):
        found = getattr(found, part)
    return found


def _reply(function: Callable, do: Callable[[], Any], form: Callable[[Any], Any]) -> str:
    try:
        with no_second_process("the environment"):
            answer = do()
            return json.dumps({"answer": form(_waited(answer) if inspect.isawaitable(answer) else answer)})
    except BaseException as error:
        kind = next(k.__name__ for k in (TypeError, Exception, BaseException) if isinstance(error, k))
        words = call_error(error, function) if kind != "BaseException" else (
            f"raised {type(error).__name__}: {one_line(error)}")
        return json.dumps({"error": words, "kind": kind})


def _waited(answer: Awaitable) -> Any:
    async def awaited() -> Any:
        return await answer

    if not _loop:
        _loop.append(asyncio.new_event_loop())
    return _loop[0].run_until_complete(awaited())
