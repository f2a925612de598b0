"""Environments and tools in worker processes, so that a crash or a hang does not end the run (environment.isolate)."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.function_worker import Source, parameters_of
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.calls import LateError, keep_time
from hybrid_rlhf.environments.contract import Environment, Environments
from hybrid_rlhf.environments.open import EnvironmentConfig, open_environments, options_of
from hybrid_rlhf.rewards.functions import from_python, handed_over, split
from hybrid_rlhf.rewards.user_code import START_SECONDS, CallFailed, Overdue, WorkerProcess, importable, signature_of

_OPTION = "environment.isolate"


# -- calls -------------------------------------------------------------------------------------------------------------


class _Worker:
    """A worker process for instances or for tools, one call at a time. If it has ended, the next call starts it again:
    its `generation` is then higher, and its instances are gone. max_chars: the most characters of an answer for a model
    that leave the process, plus one if it must be cut."""

    def __init__(self, sources: Sequence[tuple[str, str]], timeout: float, max_chars: int) -> None:
        self._timeout, self._max_chars = timeout, max_chars
        self.process = WorkerProcess(sources, _OPTION)
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other call runs there; each has a timeout. The other methods are called inside the block."""
        keep_time()
        with self._turn:
            yield

    def make(self, number: int, source: Source, options: Mapping[str, Any]) -> None:
        """Construct an instance."""
        try:
            self.process.ask("make", START_SECONDS, number=number, source=source, options=dict(options))
        except CallFailed as error:
            raise CallFailed(f"was not called: the environment's constructor {error}") from None
        except Overdue as error:  # not LateError, which advises a longer environment.timeout
            raise CallFailed(f"was not called: the environment's constructor: {error}; its process was ended") from None

    def call(self, target: Source | tuple[int, str], values: tuple, named: dict[str, Any], as_text: bool) -> Any:
        """Call a tool or a method. Raises CallFailed, or LateError if it timed out."""
        try:
            return self.process.ask("call", self._timeout, who="the environment", target=target, values=values,
                                    named=named, max_chars=self._max_chars if as_text else None)
        except Overdue as error:
            raise LateError(f"{error} (environment.timeout); its process was ended") from None


class _Workers:
    """The processes of a run, each started when it is first needed: `num` for instances, the k-th in process k modulo
    `num`; others for plain tools, as many as run at once, so that a crash of a tool loses no instances."""

    def __init__(self, num: int, sources: Sequence[tuple[str, str]], timeout: float, max_chars: int) -> None:
        self._new = partial(_Worker, sources, timeout, max_chars)
        self._workers = [self._new() for _ in range(num)]
        self._numbers = itertools.count()
        self._idle: list[_Worker] = []

    def next_place(self) -> tuple[_Worker, int]:
        """The process of the next instance, and its number."""
        number = next(self._numbers)
        return self._workers[number % len(self._workers)], number

    @contextmanager
    def idle(self) -> Iterator[_Worker]:
        """An idle process, reserved for this caller until the block ends."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = self._new()
        try:
            with worker.turn():
                yield worker
        finally:
            self._idle.append(worker)


class IsolatedObject:
    """A proxy of an instance in a worker process. `reset` constructs the instance if there is none (any more); other
    methods then fail. Method names are the user's, so the proxy's own names begin with an underscore.

    methods: signatures of the instance's methods; tools: those whose answers a model reads.
    """

    def __init__(self, source: Source, options: Mapping[str, Any], methods: Mapping[str, inspect.Signature],
                 tools: Sequence[str], workers: _Workers) -> None:
        self._source, self._options, self._methods, self._tools = source, options, methods, tools
        self._worker, self._number = workers.next_place()
        self._generation = 0  # of the process that it was made in

    def __getattr__(self, name: str) -> _Method:
        if name not in self._methods and name != "reset":
            raise AttributeError(name)
        return _Method(self, name, self._methods.get(name, inspect.Signature()))

    def _call(self, name: str, values: tuple, named: dict[str, Any]) -> Any:
        with self._worker.turn():
            process = self._worker.process
            is_there = process.is_running and self._generation == process.generation
            if not is_there and name != "reset":
                raise CallFailed(f"was not called: the environment is gone: {process.how_it_ended}")
            if not is_there:
                self._worker.make(self._number, self._source, self._options)
                self._generation = process.generation
            return self._worker.call((self._number, name), values, named, name in self._tools)


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

    workers: _Workers
    source: Source
    __signature__: inspect.Signature = field(compare=False)

    def __call__(self, **named: Any) -> Any:
        with self.workers.idle() as worker:
            return worker.call(self.source, (), named, True)


# -- opening -----------------------------------------------------------------------------------------------------------


def open_isolated(settings: EnvironmentConfig) -> Environments:
    """As open_environments(settings.factory, .tool_list, .options), but code of files and modules runs in worker
    processes; builtin ones stay here. Raises UserError in one line, also for what another process cannot import."""
    factory, tools = settings.factory, settings.tool_list
    factories = list(factory.values()) if isinstance(factory, Mapping) else [factory] if factory else []
    sources = {text: _source(text, option) for option, texts in (
        ("environment.tools", tools), ("environment.factory", factories)) for text in texts}
    files = list(dict.fromkeys(source[:2] for source in sources.values() if source))
    if not files:
        return open_environments(factory, tools, settings.options)
    python = {split(text, _OPTION, BUILTINS)[1]: source[1:] for text, source in sources.items()
              if source and source[0] == "module"}
    workers = _Workers(max(settings.num_workers, 1), files, settings.timeout, settings.max_answer_chars)
    plain = {split(text, _OPTION, BUILTINS)[1]: text for text in tools}
    kinds = [_kind(kind, settings, sources, plain, workers) for kind in _describe_in_process(settings, python)]
    return Environments(kinds, isinstance(factory, Mapping))


def _source(text: str, option: str) -> Source | None:
    """The source of a user's code; None for a builtin."""
    path, name = split(text, option, BUILTINS)
    if path == "builtin":
        return None
    if path == "python":
        return "module", *importable(from_python(name, option), name, _OPTION, "function or class")
    return "file", str(Path(path).resolve()), name


def _describe_in_process(settings: EnvironmentConfig, python: Mapping[str, tuple[str, str]]) -> list[dict]:
    """`described_kinds` in a process that ends afterwards: inspecting a class needs transformers."""
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
    """Describe what open_environments opens: {"kinds": ...} or {"refused": why}. python: module and dotted name of each
    function or class that a Python program has handed over."""
    try:
        with handed_over({name: resolve_name(":".join(where)) for name, where in python.items()}):
            return {"kinds": [_described(kind) for kind in open_environments(factory, tools, options).kinds]}
    except UserError as error:
        return {"refused": str(error)}


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
          workers: _Workers) -> Environment:
    """plain: the tools' texts in the settings by their names."""
    tools: dict[str, Any] = {}
    for name, parameters in described["tools"].items():
        source = sources[plain[name]]
        tools[name] = IsolatedTool(workers, source, signature_of(parameters)) if source else BUILTINS[name]
    make = None
    if settings.factory:
        text = settings.factory if isinstance(settings.factory, str) else settings.factory[described["name"]]
        source, options = sources[text], options_of(settings.factory, settings.options, described["name"])
        methods = {name: signature_of(parameters) for name, parameters in described["methods"].items()}
        make = (partial(IsolatedObject, source, options, methods, described["shown"], workers) if source else
                partial(BUILTINS[split(text, _OPTION, BUILTINS)[1]], **options))
    return Environment(described["name"], described["schemas"], described["has_step"], described["has_reward"], tools,
                       make, tuple(described["needed"]),
                       lane_of=lambda made: made._worker if isinstance(made, IsolatedObject) else None)
