"""Environments and tools in worker processes, whose crash or hang ends no run (environment.isolate)."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.function_worker import Source, parameters_of
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.calls import LateError, keep_time
from hybrid_rlhf.environments.contract import Environment, Environments
from hybrid_rlhf.environments.open import open_environments, options_of, split
from hybrid_rlhf.environments.settings import EnvironmentConfig
from hybrid_rlhf.rewards.deadline import Overdue
from hybrid_rlhf.rewards.functions import from_python, handed_over
from hybrid_rlhf.rewards.isolation import CallFailed, WorkerProcess, importable, signature_of

START_SECONDS = 600.0  # for a file to be run, and an instance to be made: no call is to blame for how long it takes
_OPTION = "environment.isolate"


# -- calls -------------------------------------------------------------------------------------------------------------


class _Home:
    """A worker process that instances live in, or that tools run in, one call at a time. When it has ended, the next
    call that may starts it again: its `generation` is higher then, and the instances are gone. max_chars: of the text
    of an answer that a model reads, plus one where it must be cut: no more of it leaves the process."""

    def __init__(self, sources: Sequence[tuple[str, str]], timeout: float, max_chars: int) -> None:
        self._timeout, self._max_chars = timeout, max_chars
        self.process = WorkerProcess(sources, _OPTION)
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other call is made there; a call's time is bounded. The other methods are called within."""
        keep_time()
        with self._turn:
            yield

    def ensure_running(self) -> None:
        """Raises CallFailed where the process cannot be started again."""
        if not self.process.is_running:
            try:
                self.process.start(START_SECONDS)
            except (UserError, Overdue) as error:
                raise CallFailed(f"was not called: its process could not be started again: {error}") from None

    def make(self, number: int, source: Source, options: Mapping[str, Any]) -> None:
        """Construct an instance."""
        try:
            self.process.ask("make", START_SECONDS, number=number, source=source, options=dict(options))
        except CallFailed as error:
            raise CallFailed(f"was not called: the environment's constructor {error}") from None
        except Overdue as error:  # no LateError, which is an advice to raise environment.timeout
            raise CallFailed(f"was not called: the environment's constructor: {error}; its process was ended") from None

    def call(self, target: Source | tuple[int, str], values: tuple, named: dict[str, Any], as_text: bool) -> Any:
        """The answer of a tool or a method. Raises CallFailed, or LateError where its time was up."""
        try:
            return self.process.ask("call", self._timeout, who="the environment", target=target, values=values,
                                    named=named, max_chars=self._max_chars if as_text else None)
        except Overdue as error:
            raise LateError(f"{error} (environment.timeout); its process was ended") from None


class _Homes:
    """The processes of a run, each started when it is first needed: `num` for instances, the k-th in process k modulo
    `num`; others for plain tools, as many as run at once, so that a crash of these takes no instances along."""

    def __init__(self, num: int, sources: Sequence[tuple[str, str]], timeout: float, max_chars: int) -> None:
        self._new = partial(_Home, sources, timeout, max_chars)
        self._homes = [self._new() for _ in range(num)]
        self._numbers = itertools.count()
        self._idle: list[_Home] = []

    def next_place(self) -> tuple[_Home, int]:
        """Where the next instance lives, and its number."""
        number = next(self._numbers)
        return self._homes[number % len(self._homes)], number

    @contextmanager
    def idle(self) -> Iterator[_Home]:
        """A process that makes no call, for this caller until the block ends."""
        try:
            home = self._idle.pop()
        except IndexError:
            home = self._new()
        try:
            with home.turn():
                yield home
        finally:
            self._idle.append(home)


@dataclass(frozen=True)
class _Class:
    """What makes instances of one kind. methods: their signatures; tools: those whose answers a model reads."""

    source: Source
    options: Mapping[str, Any]
    methods: Mapping[str, inspect.Signature]
    tools: frozenset[str]


class IsolatedObject:
    """Stands for an instance in a worker process. `reset` constructs it where there is none yet, or none any more;
    other methods fail without. The names of its methods are the user's, so its own begin with an underscore."""

    def __init__(self, made_by: _Class, homes: _Homes) -> None:
        self._class, (self._home, self._number) = made_by, homes.next_place()
        self._generation = 0  # of the process that it was made in

    def __getattr__(self, name: str) -> _Method:
        if name not in self._class.methods and name != "reset":
            raise AttributeError(name)
        return _Method(self, name, self._class.methods.get(name, inspect.Signature()))

    def _call(self, name: str, values: tuple, named: dict[str, Any]) -> Any:
        with self._home.turn():
            if name == "reset":
                self._home.ensure_running()
            process = self._home.process
            is_there = process.is_running and self._generation == process.generation
            if not is_there and name != "reset":
                raise CallFailed(f"was not called: the environment is gone: {process.how_it_ended}")
            if not is_there:
                self._home.make(self._number, self._class.source, self._class.options)
                self._generation = process.generation
            return self._home.call((self._number, name), values, named, name in self._class.tools)


@dataclass(frozen=True)
class _Method:
    instance: IsolatedObject
    name: str
    __signature__: inspect.Signature

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.instance._call(self.name, values, named)


@dataclass(frozen=True)
class IsolatedTool:
    """A plain function in a worker process."""

    homes: _Homes
    source: Source
    __signature__: inspect.Signature = field(compare=False)

    def __call__(self, **named: Any) -> Any:
        with self.homes.idle() as home:
            home.ensure_running()
            return home.call(self.source, (), named, True)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_isolated(settings: EnvironmentConfig) -> Environments:
    """As open_environments(settings.factory, .tool_list, .options), but no code of a file or a module is run in this
    process. What is built in stays here. Raises UserError in one line, for what another process cannot import too."""
    factory, tools = settings.factory, settings.tool_list
    texts = [*tools, *(factory.values() if isinstance(factory, Mapping) else [factory] if factory else [])]
    sources = {text: _source(text) for text in texts}
    files = list(dict.fromkeys(source[:2] for source in sources.values() if source))
    if not files:
        return open_environments(factory, tools, settings.options)
    python = {split(text, "environment")[1]: source[1:] for text, source in sources.items()
              if source and source[0] == "module"}
    homes = _Homes(max(settings.num_workers, 1), files, settings.timeout, settings.max_answer_chars)
    plain = {split(text, "environment.tools")[1]: text for text in tools}
    return Environments([_kind(kind, settings, sources, plain, homes) for kind in _asked_apart(settings, python)],
                        isinstance(factory, Mapping))


def _source(text: str) -> Source | None:
    """None of what is built in."""
    path, name = split(text, "environment")
    if path == "builtin":
        return None
    function = from_python(name) if path == "python" else None
    if function is None:
        return "file", str(Path(path).resolve()), name
    return "module", *importable(function, name, _OPTION, "function or class")


def _asked_apart(settings: EnvironmentConfig, python: Mapping[str, tuple[str, str]]) -> list[dict]:
    """What `described_kinds` says in a process that ends then: to tell what a class is takes transformers."""
    process = WorkerProcess([("module", __name__)], _OPTION)
    request = {"factory": settings.factory, "tools": settings.tool_list, "options": settings.options, "python": python}
    try:
        process.start(START_SECONDS)
        answer = process.ask("call", START_SECONDS, who="the environment", named=request,
                             target=("module", __name__, "described_kinds"))
    except (CallFailed, Overdue) as error:
        raise UserError(f"{_OPTION}: what environment.factory and environment.tools name cannot be opened: it {error}; "
                        "fix the file") from None
    finally:
        process.end()
    if "refused" in answer:
        raise UserError(answer["refused"])
    return answer["kinds"]


def described_kinds(factory: str | Mapping[str, str] | None, tools: list[str], options: Mapping[str, Any],
                    python: Mapping[str, tuple[str, str]]) -> dict:
    """What open_environments opens: {"kinds": ...} or {"refused": why}. python: module and dotted name of what a Python
    program has handed over."""
    try:
        with handed_over({name: _imported(*where) for name, where in python.items()}):
            return {"kinds": [_described(kind) for kind in open_environments(factory, tools, options).kinds]}
    except UserError as error:
        return {"refused": str(error)}


def _imported(module: str, path: str) -> Any:
    value: Any = import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _described(kind: Environment) -> dict:
    instance = kind.new().object
    protocol = [name for name, is_there in (("reset", hasattr(instance, "reset")), ("step", kind.has_step),
                                            ("get_reward", kind.has_reward)) if is_there]
    methods = [name for name in kind.tool_names if name not in kind.tools]
    return {"name": kind.name, "schemas": kind.schemas, "has_step": kind.has_step, "has_reward": kind.has_reward,
            "needed": kind.needed, "tools": {name: parameters_of(tool) for name, tool in kind.tools.items()},
            "shown": methods, "methods": {name: parameters_of(getattr(instance, name))
                                          for name in [*protocol, *methods]}}


def _kind(described: dict, settings: EnvironmentConfig, sources: Mapping[str, Source | None], plain: Mapping[str, str],
          homes: _Homes) -> Environment:
    """plain: the tools' texts in the settings by the names that they are called by."""
    tools: dict[str, Any] = {}
    for name, parameters in described["tools"].items():
        source = sources[plain[name]]
        tools[name] = IsolatedTool(homes, source, signature_of(parameters)) if source else BUILTINS[name]
    make = None
    if settings.factory:
        text = settings.factory if isinstance(settings.factory, str) else settings.factory[described["name"]]
        source, options = sources[text], options_of(settings.factory, settings.options, described["name"])
        methods = {name: signature_of(parameters) for name, parameters in described["methods"].items()}
        make = partial(IsolatedObject, _Class(source, options, methods, frozenset(described["shown"])), homes
                       ) if source else partial(BUILTINS[split(text, "environment.factory")[1]], **options)
    return Environment(described["name"], described["schemas"], described["has_step"], described["has_reward"], tools,
                       make, tuple(described["needed"]), lane_of=_lane_of)


def _lane_of(instance: object) -> _Home | None:
    """What the calls of an instance wait for; None of one in this process."""
    return instance._home if isinstance(instance, IsolatedObject) else None
