"""A Python function as a source, called as TRL calls reward functions."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.rewards import BadAnswer, shown
from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.rewards.deadline import Overdue, within
from hybrid_rlhf.rollout import Rollout

OURS = ("prompts", "completions", "completion_ids")


@dataclass
class FunctionSource:
    """`function(prompts=, completions=, completion_ids=, every dataset column=, **options)` -> a score or None each.

    All are lists of B values. A prompt is what the dataset holds: text, then the completion is text too, or messages,
    then it is a list of one assistant message. A function that takes no **keywords gets those it names. It may be
    `async`. A call may take `timeout` seconds; one that takes longer, or raises, is BadAnswer with the response's
    number.
    """

    name: str
    function: Callable
    options: dict = field(default_factory=dict)
    timeout: float = 60.0
    function_name: str = ""

    def score(self, rollout: Rollout) -> list:
        if not len(rollout):
            return []
        given = self._taken(inputs(rollout))
        try:
            return within(self.timeout, lambda: self._call(given))
        except (Exception, SystemExit) as error:
            i, own = self._culprit(given, len(rollout), error)
            which = f"response {i} of {len(rollout)}" if i is not None else f"the {len(rollout)} responses together"
            ending = f": {shown(rollout, i)}" if i is not None else ""
            what = described(own, self.timeout, self.function)
            raise BadAnswer(f"reward source {self.name}: {what} for {which}{ending}; fix the function, or give "
                            "another") from error

    def _call(self, given: dict[str, list]) -> object:
        answer = self.function(**given, **self.options)
        answer = asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer
        return answer.tolist() if hasattr(answer, "tolist") else answer  # a tensor or an array of it

    def _culprit(self, given: dict[str, list], size: int, error: BaseException) -> tuple[int | None, BaseException]:
        """The first response that fails alone as well, within as much time again, and how; None if none does."""
        deadline = time.monotonic() + self.timeout
        for i in range(size):
            one = {name: values[i : i + 1] for name, values in given.items()}
            try:
                within(max(deadline - time.monotonic(), 0.01), lambda one=one: self._call(one))
            except (Exception, SystemExit) as own:
                return i, own
        return None, error

    def _taken(self, given: dict[str, list]) -> dict[str, list]:
        named, takes_all = parameters(self.function)
        return {k: v for k, v in given.items() if k not in self.options and (takes_all or k in named)}

    def check_columns(self, columns: Iterable[str]) -> None:
        """UserError for a function that needs a column which the data does not have. columns: those there are."""
        known = {*OURS, *columns, *self.options}
        needed = [n for n, p in inspect.signature(self.function).parameters.items()
                  if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        needed += [self.function.column] if type(self.function) in BUILTINS.values() and hasattr(
            self.function, "column") else []
        for name in needed:
            check(name in known, f"reward.functions: {self.name} needs a column {name}, and the data has "
                                 f"{', '.join(columns)}{nearest(name, columns)}")


async def _awaited(answer):  # noqa: ANN001, ANN202
    return await answer


def inputs(rollout: Rollout) -> dict[str, list]:
    """prompts, completions, completion_ids and the dataset's columns as lists of B values, as TRL names them."""
    prompts = rollout.prompts.columns.get("prompt") or rollout.prompts.texts
    lengths = rollout.response_mask.sum(1).tolist()
    own = {"prompts": list(prompts),
           "completions": [said(p, c) for p, c in zip(prompts, rollout.completions, strict=True)],
           "completion_ids": [row[:n] for row, n in zip(rollout.response_ids.tolist(), lengths, strict=True)]}
    return {k: v for k, v in rollout.prompts.columns.items() if k != "prompt"} | own


def said(prompt: Text, completion: str) -> Text:
    """The completion in the prompt's own form: text, or a list of one message."""
    return completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]


def parameters(function: Callable) -> tuple[list[str], bool]:
    """The names of a function's parameters, and whether it takes any other keyword."""
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind is not p.VAR_KEYWORD], any(p.kind is p.VAR_KEYWORD for p in found)


def described(error: BaseException, timeout: float, function: Callable | None = None) -> str:
    """What happened, in one line, with the line of the function's own file."""
    if isinstance(error, Overdue):
        return f"no answer within {timeout:g} s (reward.timeout)"
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if code and f.filename == code.co_filename]
    where = f" ({Path(code.co_filename).name} line {lines[-1]})" if lines else ""
    return f"raised {type(error).__name__}: {one_line(error)}{where}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


_given: dict[str, Callable] = {}  # functions that a Python program has handed over, by name


@contextmanager
def handed_over(functions: Mapping[str, Callable]) -> Iterator[None]:
    """Within, `python:name` names these functions: they have no file that could be read again."""
    before = dict(_given)
    _given.update(functions)
    try:
        yield
    finally:
        _given.clear()
        _given.update(before)


def open_functions(given: list[str], options: dict[str, dict], timeout: float) -> list[FunctionSource]:
    """The sources that each `path.py:name`, `builtin:name` or `python:name@version` (of those handed over) names;
    options by name. A second one of a name is name_2.

    A file is run once. Raises UserError for what cannot be had.
    """
    modules: dict[str, ModuleType] = {}
    found: list[FunctionSource] = []
    for text in given:
        path, _, name = text.partition("@")[0].rpartition(":") if text.startswith("python:") else text.rpartition(":")
        check(bool(path and name), f"reward.functions: {text!r} names no function; give path.py:name, or builtin:name "
                                   f"with one of {', '.join(BUILTINS)}")
        count = sum(f.function_name == name for f in found) + 1
        source = name if count == 1 else f"{name}_{count}"
        own = options.get(source, {})
        if path == "builtin":
            found.append(FunctionSource(source, _builtin(name, source, own), {}, timeout, name))
            continue
        if path == "python":
            check(name in _given, f"reward.functions: {name} was given from Python, and nothing gives it here; run it "
                                  "from there, or put it into a file as path.py:name")
            found.append(FunctionSource(source, _given[name], own, timeout, name))
            continue
        if path not in modules:
            modules[path] = _module(path)
        found.append(FunctionSource(source, _function(modules[path], path, name, source, own), own, timeout, name))
    for key in options:
        names = [f.name for f in found]
        check(key in names, f"reward.options: {key} is none of reward.functions ({', '.join(names) or 'none given'})"
                            f"{nearest(key, names)}")
    return found


def _function(module: ModuleType, path: str, name: str, source: str, options: dict) -> Callable:
    function = getattr(module, name, None)
    check(callable(function), f"reward.functions: {path} has no function {name}"
                              f"{nearest(name, [k for k, v in vars(module).items() if callable(v)])}")
    named, takes_all = parameters(function)
    for key in options:
        check(takes_all or key in named, f"reward.options.{source}: {name} in {path} takes no {key}"
                                         f"{nearest(key, named)}")
    return function


def _builtin(name: str, source: str, options: dict) -> Callable:
    check(name in BUILTINS, f"reward.functions: there is no builtin:{name}{nearest(name, BUILTINS)}; there are "
                            f"{', '.join(BUILTINS)}")
    known = list(BUILTINS[name].__dataclass_fields__)
    for key in options:
        check(key in known, f"reward.options.{source}: there is no {key}{nearest(key, known)}; there are "
                            f"{', '.join(known)}")
    missing = [n for n, f in BUILTINS[name].__dataclass_fields__.items() if n not in options
               and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    check(not missing, f"reward.functions: builtin:{name} needs {' and '.join(missing)}; give reward.options "
                       f"'{{{source}: {{{', '.join(f'{n}: ...' for n in missing)}}}}}'")
    try:
        return BUILTINS[name](**options)
    except (TypeError, ValueError) as error:
        raise UserError(f"reward.options.{source}: {one_line(error)}; fix reward.options") from error


def _module(path: str) -> ModuleType:
    """The file as a module. UserError, with the line, for one that cannot be run."""
    check(Path(path).is_file() and path.endswith(".py"),
          f"reward.functions: {path} is no Python file; give path.py:name")
    where = str(Path(path).resolve())
    module = ModuleType(f"reward_functions_{Path(path).stem}")
    module.__file__ = where
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), where, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == where]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        raise UserError(f"reward.functions: {path}{f' line {line}' if line else ''} cannot be run: "
                        f"{type(error).__name__}: {one_line(error)}; fix the file") from error
    return module
