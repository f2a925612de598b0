"""The interface of environments: TRL's class of `reset`, tools and `get_reward`, or one with `step(messages)`."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from hybrid_rlhf.core.errors import UserError, check, nearest
from hybrid_rlhf.core.function_worker import call_error, no_second_process, one_line
from hybrid_rlhf.environments.calls import CallError
from hybrid_rlhf.models.tool_schema import schema_of
from hybrid_rlhf.rewards.functions import fresh, needed_by, parameters
from hybrid_rlhf.rewards.user_code import CallFailed, unchanged

_NO_TOOLS = ("reset", "get_reward")
_ROLES = ("user", "tool", "system")


@dataclass(frozen=True, eq=False)
class Environment:
    """One kind of environment. schemas: of its tools, the plain functions and then its methods by name.

    has_step: whether it answers each message of the model, with or without tool calls. has_reward: whether it has a
    reward of its own. tools: the plain functions by name, which belong to no instance. make: constructs an instance;
    None where there are only tools. needed: columns that reset requires. lane_of: the lane of an instance's calls, for
    CallPool.start.
    """

    name: str
    schemas: list[dict]
    has_step: bool
    has_reward: bool
    tools: Mapping[str, Callable] = field(default_factory=dict)
    make: Callable[[], object] | None = None
    needed: tuple[str, ...] = ()
    lane_of: Callable[[object], Hashable] = field(default=lambda _: None, kw_only=True)
    _spare: list[object] = field(default_factory=list)  # the instance that was made for inspection

    @property
    def tool_names(self) -> list[str]:
        return [schema["function"]["name"] for schema in self.schemas]

    def new(self) -> Instance:
        """A new instance. UserError if the constructor raises."""
        if self.make is None:
            return Instance(self, None)
        return Instance(self, self._spare.pop() if self._spare else constructed(self.make, self.name))


def constructed(make: Callable[[], object], name: str) -> object:
    """An instance from a user's class or function; UserError in one line if it raises."""
    try:
        with unchanged(f"environment {name}"), no_second_process(f"environment {name}"):
            return make()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        factory = getattr(make, "func", make)  # of a partial
        function = factory.__init__ if inspect.isclass(factory) else factory
        raise UserError(f"environment {name}: its constructor {call_error(error, function)}; fix it, or give it what "
                        "it takes by environment.options") from error


def environment_of(name: str, make: Callable[[], object], tools: Mapping[str, Callable], where: str) -> Environment:
    """The kind of environment that `make` constructs. tools: plain functions beside its methods.

    where: its name in messages. Raises UserError in one line for what TRL's interface does not allow: a class without
    reset, methods that a schema cannot describe, two tools of one name.
    """
    instance: Any = constructed(make, name)
    methods = dict(inspect.getmembers(type(instance), inspect.isfunction))  # on the class: properties are not evaluated
    has_step = "step" in methods and _is_protocol(instance.step)
    kind = type(instance).__name__
    check(has_step or "reset" in methods,
          f"{where}: {kind} has no method reset; an environment needs reset(**row), or step(messages)")
    names = [n for n in methods if not n.startswith("_") and n not in _NO_TOOLS and not (has_step and n == "step")]
    for method in names:
        check(method not in tools, f"{where}: {kind} has a method {method}, and environment.tools a function {method}; "
                                   "a tool needs a name of its own")
    schemas = plain_schemas(tools) | {n: _named(schema_of(getattr(instance, n), f"{where}: {n}"), n) for n in names}
    return Environment(name, list(schemas.values()), has_step, "get_reward" in methods, dict(tools), make,
                       tuple(needed_by(instance.reset)) if "reset" in methods else (), [instance])


def plain_schemas(tools: Mapping[str, Callable]) -> dict[str, dict]:
    """The schemas of plain functions by the names of their tools."""
    return {name: _named(schema_of(tool, f"environment.tools: {name}"), name) for name, tool in tools.items()}


def _named(schema: dict, name: str) -> dict:
    """The schema with the tool's name; a decorated function has another name."""
    return {**schema, "function": {**schema["function"], "name": name}}


def _is_protocol(step: Callable) -> bool:
    """Whether it is step(messages); in TRL's classes `step` may be an ordinary tool."""
    return [n for n, p in inspect.signature(step).parameters.items()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)] == ["messages"]


class Instance:
    """One environment, for one episode at a time: constructed once, reset often.

    Its methods may return a coroutine, which is to be awaited. Their errors are CallError, with a message that a model
    can be shown. Only one call of the user's object runs at a time: while an earlier one that timed out has not
    returned (`is_busy`), others are refused at once, except `step` and `reward`, without which an episode cannot end.
    Plain tools have no object and no such limit. lane: of its calls, for CallPool.start.
    """

    def __init__(self, environment: Environment, user_object: Any) -> None:
        self.environment, self.object, self.lane = environment, user_object, environment.lane_of(user_object)
        self._lock = threading.Lock()
        self._runs = ""

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode of the data's `row`; returns None, or text to append to the last user message. A reset
        without **keywords gets the columns that it names."""
        if not hasattr(self.object, "reset"):
            return None
        named, takes_all = parameters(self.object.reset)
        columns = {k: fresh(v) for k, v in row.items() if takes_all or k in named}
        return self._one_at_a_time("reset", self.object.reset, lambda: self.object.reset(**columns), _text_or_none)

    def is_async(self, name: str) -> bool:
        """Whether the tool `name` is a coroutine function."""
        return inspect.iscoroutinefunction(self._tool(name))

    def call(self, name: str, arguments: object) -> Any:
        """Call the tool `name` with the `arguments` that the model wrote."""
        tool, known = self._tool(name), self.environment.tool_names
        if tool is None:
            raise CallError(f"there is no tool {name!s:.60}{nearest(str(name)[:60], known)}; there are "
                            f"{', '.join(known) or 'none'}")
        takes = f"its parameters are {self._parameters(name) or 'none'}"
        if not isinstance(arguments, dict):
            raise CallError(f"the arguments of {name} must be a JSON object; {takes}")
        values = fresh(arguments)
        try:
            inspect.signature(tool).bind(**values)
        except TypeError as error:
            raise CallError(f"{name}: {one_line(error)}; {takes}") from error
        if name in self.environment.tools:
            return _answer(name, tool, lambda: tool(**values), hint=takes)
        return self._one_at_a_time(name, tool, lambda: tool(**values), hint=takes)

    def step(self, messages: list[dict]) -> Any:
        """(messages, done, reward): the messages that the environment adds to the conversation, whether the episode
        ends, and the reward of the model's last turn, or None."""
        conversation = fresh(messages)
        return self._beside("step", self.object.step, lambda: self.object.step(conversation), _checked_step)

    def reward(self) -> Any:
        """The unchecked answer of get_reward()."""
        return self._beside("get_reward", self.object.get_reward, lambda: self.object.get_reward())

    def _tool(self, name: str) -> Callable | None:
        if name in self.environment.tools:
            return self.environment.tools[name]
        return getattr(self.object, name) if name in self.environment.tool_names else None

    def _parameters(self, name: str) -> str:
        shape = next(s["function"]["parameters"] for s in self.environment.schemas if s["function"]["name"] == name)
        return ", ".join(f"{n} ({_type_of(p)}{'' if n in shape.get('required', ()) else ', optional'})"
                         for n, p in shape["properties"].items())

    def _one_at_a_time(self, name: str, *call: Any, hint: str = "") -> Any:
        with self._alone(name):
            answer = _answer(name, *call, hint=hint)
        return self._awaited_alone(name, answer) if inspect.isawaitable(answer) else answer

    def _beside(self, name: str, *call: Any) -> Any:
        """One at a time, except beside a call that timed out: the model was told, and the episode goes on."""
        return _answer(name, *call) if self.is_busy else self._one_at_a_time(name, *call)

    async def _awaited_alone(self, name: str, answer: Awaitable) -> Any:
        with self._alone(name):
            return await answer

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise CallError(f"{name} was not called: {self._runs} still runs from an earlier call, whose time was up")
        self._runs = name
        try:
            yield
        finally:
            self._lock.release()


class Environments:
    """The environments of a run: `kinds`, among which a row's column `environment` chooses where they have names."""

    def __init__(self, kinds: list[Environment], is_chosen_by_row: bool) -> None:
        self.kinds, self.is_chosen_by_row = kinds, is_chosen_by_row

    def of(self, row: Mapping[str, Any]) -> Environment:
        """The kind of environment of a row of the data. UserError for an unknown name."""
        if not self.is_chosen_by_row:
            return self.kinds[0]
        known = {kind.name: kind for kind in self.kinds}
        name = row.get("environment")
        check(isinstance(name, str) and name in known,
              f"the column environment of a row is {name!r:.60}, and environment.factory has {', '.join(known)}"
              f"{nearest(str(name)[:60], known)}; each row needs one of these")
        return known[str(name)]

    def columns_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of a row that reset gets: all but the name that chooses the environment."""
        return {k: v for k, v in row.items() if not (self.is_chosen_by_row and k == "environment")}

    def check_columns(self, columns: Iterable[str]) -> None:
        """UserError if the data, which has `columns`, lacks one that the resets of all kinds require."""
        have = list(columns)
        needed = {n: kind.name for kind in self.kinds for n in kind.needed
                  if all(n in other.needed for other in self.kinds)}
        if self.is_chosen_by_row:
            needed["environment"] = "environment.factory with several of them"
        for name, who in needed.items():
            check(name in have, f"{who} needs a column {name}, and the data has {', '.join(have) or 'no columns'}"
                                f"{nearest(name, have)}; give the rows one")


def _answer(name: str, function: Callable, call: Callable[[], Any], then: Callable[[Any], Any] = lambda answer: answer,
            *, hint: str = "") -> Any:
    """then(call()), or a coroutine of it. Errors are CallError with the line of the function's own file."""
    with _call_errors(name, function, hint):
        answer = call()
        if not inspect.isawaitable(answer):
            return then(answer)

    async def awaited() -> Any:
        with _call_errors(name, function, hint):
            return then(await answer)

    return awaited()


@contextmanager
def _call_errors(name: str, function: Callable, hint: str) -> Iterator[None]:
    try:
        yield
    except CallError:
        raise
    except CallFailed as error:
        raise CallError(f"{name} {error}{f'; {hint}' if hint and error.is_type_error else ''}") from error
    except Exception as error:
        ending = f"; {hint}" if hint and isinstance(error, TypeError) else ""
        raise CallError(f"{name} {call_error(error, function)}{ending}") from error


def _text_or_none(answer: Any) -> str | None:
    if answer is None or isinstance(answer, str):
        return answer
    raise CallError(f"reset answered a {type(answer).__name__}, where text or None is needed")


def _checked_step(answer: Any) -> tuple[list[dict], bool, float | None]:
    if not isinstance(answer, (tuple, list)) or len(answer) != 3:
        raise CallError(f"step answered a {type(answer).__name__}, where (messages, done, reward) is needed")
    added, done, reward = answer
    added = [{"role": "user", "content": added}] if isinstance(added, str) else added
    if not isinstance(added, (list, tuple)) or not all(
            isinstance(m, dict) and m.get("role") in _ROLES and isinstance(m.get("content"), str) for m in added):
        raise CallError("step answered messages that are not a list of {'role': 'user' or 'tool', 'content': text}")
    if not isinstance(done, (bool, np.bool_)):
        raise CallError(f"step answered done as a {type(done).__name__}, where True or False is needed")
    if not added and not done:
        raise CallError("step answered no message, and that the episode goes on; the model needs one to answer to")
    return [dict(m) for m in added], bool(done), _number(reward)


def _number(reward: Any) -> float | None:
    reward = reward.item() if hasattr(reward, "item") else reward
    if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
        raise CallError(f"step answered the reward {reward!r:.60}, where a finite number or None is needed")
    return None if reward is None else float(reward)


def _type_of(shape: Mapping[str, Any]) -> str:
    if "enum" in shape:
        return f"one of {', '.join(map(str, shape['enum']))}"
    kind = shape.get("type", "any type")
    return kind if isinstance(kind, str) else " or ".join(kind)
