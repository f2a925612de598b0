"""A Python function as a source, called as TRL calls reward functions."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.function_worker import answer_of, call_error, file_error, one_line, run_file
from hybrid_rlhf.core.image_files import open_image
from hybrid_rlhf.core.options import nearest_path
from hybrid_rlhf.data.turns import in_parts
from hybrid_rlhf.rewards import BadAnswer, shown
from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.rewards.user_code import (
    CallFailed,
    IsolatedFunction,
    Overdue,
    WorkerProcess,
    function_of_module,
    functions_of_file,
    unchanged,
    within,
)
from hybrid_rlhf.rollout import Rollout

_OPTION = "reward.functions"
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
        arguments = self._arguments(rollout)
        try:
            return self._answer(arguments, self.timeout)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            i, cause = self._culprit(rollout, error)
            which = f"response {i} of {len(rollout)}" if i is not None else f"the {len(rollout)} responses together"
            ending = f": {shown(rollout, i)}" if i is not None else ""
            names = ", ".join(name for name in arguments if name != "environments")
            raise BadAnswer(f"reward source {self.name}: {self._described(cause)} for {which}{ending}; it was given "
                            f"{names}; fix the function, or give another") from error

    def _answer(self, arguments: dict[str, list], seconds: float) -> Any:
        who, named = f"reward source {self.name}", arguments | fresh(self.options)
        with unchanged(who):
            if isinstance(self.function, IsolatedFunction):
                return self.function(who, named, seconds)
            scores = within(seconds, lambda: answer_of(who, lambda: self.function(**named)))
            return scores.tolist() if hasattr(scores, "tolist") else scores

    def _culprit(self, rollout: Rollout, error: BaseException) -> tuple[int | None, BaseException]:
        """The first response that fails alone as well, within as much time again, and how; None if none does."""
        deadline = time.monotonic() + self.timeout
        arguments = self._arguments(rollout)
        for i in range(len(rollout)):
            try:
                self._answer({name: values[i : i + 1] for name, values in arguments.items()},
                             max(deadline - time.monotonic(), 0.01))
            except KeyboardInterrupt:
                raise
            except BaseException as cause:
                return i, cause
        return None, error

    def _described(self, error: BaseException) -> str:
        """What happened, in one line, with the line of the function's own file."""
        if not isinstance(error, Overdue):
            return str(error) if isinstance(error, CallFailed) else call_error(error, self.function)
        return f"no answer within {self.timeout:g} s (reward.timeout)"

    def _arguments(self, rollout: Rollout) -> dict[str, list]:
        """Copies of the inputs that the function takes. A function in this process that names `environments`, or takes
        any keyword, also gets the environment object of each episode, as in TRL. Images are Pillow's, as there."""
        named, takes_all = parameters(self.function)
        arguments = {k: v for k, v in inputs(rollout).items() if k not in self.options and (takes_all or k in named)}
        read = cache(open_image)  # once for all responses to a prompt
        for prompt, row in zip(arguments.get("prompts", ()), rollout.prompts.images, strict=False):
            for part, image in zip(_image_parts(prompt), row, strict=False):
                part["image"] = read(image)
        if any(rollout.prompts.images) and "images" in arguments:
            arguments["images"] = [list(map(read, row)) for row in rollout.prompts.images]
        if any(rollout.prompts.images) and "image" in named:  # the name of a column with one
            arguments["image"] = [read(row[0]) if row else None for row in rollout.prompts.images]
        is_taken = "environments" in named or (takes_all and not isinstance(self.function, IsolatedFunction))
        environments = [episode.environment for episode in rollout.episodes]
        if is_taken and any(each is not None for each in environments):
            arguments["environments"] = environments
        return arguments

    def takes(self, column: str) -> bool:
        """Whether the function receives a column of the data; for a builtin, whether it reads it."""
        named, takes_all = parameters(self.function)
        if type(self.function) in BUILTINS.values():
            named, takes_all = [getattr(self.function, "column", ""), "answer"], False
        return column not in self.options and (takes_all or column in named)

    def check_columns(self, columns: Iterable[str]) -> None:
        """UserError if the function needs a column that the data does not have. columns: those of the data."""
        known = {*OURS, *columns, *self.options, *["image"] * ("images" in columns)}
        needed = needed_by(self.function)
        if type(self.function) in BUILTINS.values() and hasattr(self.function, "column"):
            needed.append(self.function.column)
        for name in needed:
            check(name in known, f"reward.functions: {self.name} needs a column {name}, and the data has "
                                 f"{', '.join(columns) or 'no more columns'}{nearest(name, [*columns, *OURS])}; "
                                 f"{', '.join(OURS)} are always given")


def inputs(rollout: Rollout) -> dict[str, list]:
    """prompts, completions, completion_ids and the dataset's columns as lists of B values, as TRL names them.

    Prompts with images have parts for them, and a column `images` has an ImageRef (path, width, height) for each. A
    completion has the form of its prompt: text, or a list of one message; for an episode, all of its messages. All
    are copies: a function that changes them changes nothing for the next one or the next response.
    """
    prompts = rollout.prompts.given
    lengths = rollout.response_mask.sum(1).tolist()
    completions = [[{"role": "assistant", "content": c}] if isinstance(c, str) and not isinstance(p, str) else c
                   for p, c in zip(prompts, rollout.responses(), strict=True)]
    always = {"prompts": list(map(in_parts, prompts)), "completions": completions,
              "completion_ids": [row[:n] for row, n in zip(rollout.response_ids.tolist(), lengths, strict=True)]}
    return fresh({k: v for k, v in rollout.prompts.columns.items() if k != "prompt"} | always)


def _image_parts(prompt: str | list[dict]) -> list[dict]:
    """The parts of a prompt's messages that are images."""
    contents = [] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    return [part for content in contents if isinstance(content, list) for part in content if part["type"] == "image"]


def fresh(value: object) -> Any:
    """A deep copy of lists and mappings; strings and numbers are returned as they are."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if type(value) is list:
        return [fresh(each) for each in value]
    return {k: fresh(v) for k, v in value.items()} if type(value) is dict else deepcopy(value)


def parameters(function: Callable) -> tuple[list[str], bool]:
    """The names of a function's parameters, and whether it takes any other keyword."""
    known = inspect.signature(function).parameters.values()
    return [p.name for p in known if p.kind is not p.VAR_KEYWORD], any(p.kind is p.VAR_KEYWORD for p in known)


def needed_by(function: Callable) -> list[str]:
    """The names of the parameters that a function cannot be called without by keyword."""
    return [n for n, p in inspect.signature(function).parameters.items()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


_handed_over: dict[str, Callable] = {}  # functions that a Python program has handed over, by name


@contextmanager
def handed_over(functions: Mapping[str, Callable]) -> Iterator[None]:
    """Inside the block `python:name` names these functions, which have no file to load them from."""
    before = dict(_handed_over)
    _handed_over.update(functions)
    try:
        yield
    finally:
        _handed_over.clear()
        _handed_over.update(before)


def from_python(name: str, option: str) -> Callable:
    """The function that a Python program has handed over by this name; UserError where none has."""
    check(name in _handed_over, f"{option}: {name} was given from Python, and nothing gives it here; run it from "
                                "there, or put it into a file as path.py:name")
    return _handed_over[name]


def split(text: str, option: str, builtins: Iterable[str]) -> tuple[str, str]:
    """(file, "builtin" or "python"; name) of `path.py:name`, `builtin:name` or `python:name@version`, as the setting
    `option` names a function or a class. UserError for another text, for an unknown builtin and for a missing file."""
    path, _, name = text.partition("@")[0].rpartition(":") if text.startswith("python:") else text.rpartition(":")
    check(path and name, f"{option}: {text!r} names no function or class; give path.py:name, or builtin:name with one "
                         f"of {', '.join(builtins)}")
    check(path != "builtin" or name in builtins,
          f"{option}: there is no builtin:{name}{nearest(name, builtins)}; there are {', '.join(builtins)}")
    check(path in ("builtin", "python") or Path(path).exists(),
          f"{option}: {path} does not exist{nearest_path(path)}; give path.py:name")
    check(path in ("builtin", "python") or (Path(path).is_file() and path.endswith(".py")),
          f"{option}: {path} is not a Python file; give path.py:name")
    return path, name


def run_named(path: str, option: str) -> ModuleType:
    """Run the file of a `path.py:name` as a module. UserError, with the line, if it cannot be run."""
    try:
        with unchanged(path):
            return run_file(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(f"{option}: {file_error(path, error)}; fix the file") from error


def named(text: str, option: str, builtins: Mapping[str, Callable], files: dict[str, Any],
          run: Callable[[str, str], Any] = run_named) -> Callable:
    """The function or class that `text` names, as `split` reads it. files: those that were run so far, by path; a new
    one is added by `run`. UserError for what is not there."""
    path, name = split(text, option, builtins)
    if path == "builtin":
        return builtins[name]
    if path == "python":
        return from_python(name, option)
    if path not in files:
        files[path] = run(path, option)
    value, home = getattr(files[path], name, None), getattr(files[path], "__name__", None)
    defined = [k for k, v in vars(files[path]).items() if callable(v) and home in (None, getattr(v, "__module__", ""))]
    check(callable(value), f"{option}: {path} has no {name} that can be called; there is "
                           f"{', '.join(defined) or 'none'}{nearest(name, defined)}")
    return value  # type: ignore[return-value]  # checked above


def check_options(function: Callable, options: Mapping[str, Any], text: str, option: str, is_complete: bool) -> None:
    """UserError for keywords that a function or class does not take. text: its name in the settings; option: the
    setting with the keywords; is_complete: whether it gets no others, so that each that it needs must be there."""
    try:
        known, takes_all = parameters(function)
        needed = [name for name in needed_by(function) if name not in options and is_complete]
    except (ValueError, TypeError):  # no signature
        return
    for key in options:
        check(takes_all or key in known, f"{option}: {text} takes no {key}{nearest(str(key), known)}; it takes "
                                         f"{', '.join(known) or 'none'}")
    check(not needed, f"{text} needs {' and '.join(needed)}; give {option} "
                      f"'{{{', '.join(f'{name}: ...' for name in needed)}}}'")


def open_functions(specs: list[str], options: dict[str, dict], timeout: float, isolate: bool = False
                   ) -> list[FunctionSource]:
    """The sources that `specs` name, as `split` reads them. options: by name. A second one of a name is name_2.

    A file is run once, with `isolate` in a process of its own. Raises UserError for a function that cannot be loaded.
    """
    files: dict[str, ModuleType | SimpleNamespace] = {}
    processes: dict[str, WorkerProcess] = {}  # by module, of functions from Python
    sources: list[FunctionSource] = []
    for text in specs:
        path, name = split(text, _OPTION, BUILTINS)
        count = sum(f.function_name == name for f in sources) + 1
        source = name if count == 1 else f"{name}_{count}"
        own_options = options.get(source, {})
        function = named(text, _OPTION, BUILTINS, files, functions_of_file if isolate else run_named)
        if path != "python":
            check_options(function, own_options, text, f"reward.options.{source}", is_complete=path == "builtin")
        elif isolate:
            function = function_of_module(function, name, processes)
        if path == "builtin":
            try:
                function, own_options = function(**own_options), {}
            except (TypeError, ValueError) as error:
                raise UserError(f"reward.options.{source}: {one_line(error)}; fix reward.options") from error
        sources.append(FunctionSource(source, function, own_options, timeout, name))
    for key in options:
        names = [f.name for f in sources]
        check(key in names, f"reward.options: {key} is none of reward.functions ({', '.join(names) or 'none given'})"
                            f"{nearest(key, names)}")
    return sources
