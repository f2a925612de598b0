"""Environments and tools in processes of their own, where what they do ends nobody else (environment.isolate)."""

from __future__ import annotations

import inspect
import itertools
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hybrid_rlhf.environments.calls import CallError, LateError, keep_time
from hybrid_rlhf.environments.isolated_worker import Source
from hybrid_rlhf.rewards.deadline import Overdue
from hybrid_rlhf.rewards.isolation import CallFailed, FunctionProcess, foreign

_WORKER = "hybrid_rlhf.environments.isolated_worker"
START_SECONDS = 600.0  # for a file to be run, and an instance to be made: no call is to blame for how long it takes


class ApartError(Exception):
    """What someone else's code did in another process, in words that follow its name: "raised ValueError: ..."."""


class ApartTypeError(ApartError, TypeError):
    """It raised TypeError there."""


@cache
def _starter() -> ThreadPoolExecutor:
    """The thread that starts all processes: Linux ends a process with the thread that started it, and this one lives
    as long as the run does."""
    return ThreadPoolExecutor(1, thread_name_prefix="starter of processes")


class Home:
    """A process that instances live in, or that tools run in, one call at a time. Once it has ended, `run` starts
    another one: then `generation` is higher, and the instances are gone."""

    def __init__(self, sources: Sequence[Source], timeout: float) -> None:
        self.timeout, self.generation = timeout, 0
        self.dropped: list[int] = []  # instances that nobody uses any more
        self.how_it_ended = "its process has ended"
        self._sources = sources
        self._process = FunctionProcess("module", _WORKER, "environment.isolate", _starter())
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other call is made there, whose time is bounded. The rest of the methods are for who has it."""
        keep_time()
        with self._turn:
            yield

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def run(self) -> None:
        """See that it runs. ApartError where it cannot."""
        if self.is_running:
            return
        try:
            self._process.start(START_SECONDS)
            self.generation += 1
            self.ask("load", START_SECONDS, sources=self._sources)
        except (ApartError, Overdue) as error:
            self._process.end()
            raise ApartError(f"was not called: its process could not be started again: {error}") from None

    def ask(self, function: str, seconds: float, **given: Any) -> Any:
        """What a function of the worker answers. ApartError with what went wrong, LateError where the time was up;
        CallError for what is no Exception, as SystemExit, of which nobody says in whose call it was raised."""
        try:
            reply = json.loads(self._process.call(("environment", function, given, {}), seconds))
        except CallFailed as error:
            self.how_it_ended = f"an earlier call {error}"
            raise ApartError(str(error)) from None
        except BaseException as error:  # its time was up, by this clock or by the pool's; or Ctrl-C
            self.how_it_ended = "it was ended with an earlier call, whose time was up"
            if not isinstance(error, Overdue):
                raise
            option = "" if seconds == START_SECONDS else " (environment.timeout)"
            raise LateError(f"no answer within {seconds:g} s{option}; its process was ended") from None
        if "error" not in reply:
            return reply["answer"]
        raise {"TypeError": ApartTypeError, "Exception": ApartError}.get(reply["kind"], CallError)(reply["error"])


class Homes:
    """The processes of a run, each started when it is first needed: `num` for instances, the k-th in process k modulo
    `num`; others for plain tools, as many as run at once, so that these take no instances with them."""

    def __init__(self, num: int, sources: Sequence[Source], timeout: float) -> None:
        self._sources, self._timeout = sources, timeout
        self._homes = [self._new() for _ in range(num)]
        self._numbers = itertools.count()
        self._idle: list[Home] = []

    def _new(self) -> Home:
        return Home(self._sources, self._timeout)

    def next_place(self) -> tuple[Home, int]:
        """Where the next instance lives, and its number."""
        number = next(self._numbers)
        return self._homes[number % len(self._homes)], number

    @contextmanager
    def idle(self) -> Iterator[Home]:
        """A process that makes no call, which is this caller's until the block ends."""
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
class Class:
    """What makes instances of one kind. methods: their signatures; is_shown: those that answer a model, whose answers
    come back as text of at most max_chars characters."""

    source: Source
    options: Mapping[str, Any]
    methods: Mapping[str, inspect.Signature]
    is_shown: frozenset[str]
    max_chars: int


class IsolatedObject:
    """Stands for an instance in another process. `reset` constructs it where there is none yet, or none any more; other
    methods fail without. The names of its methods are the user's, so its own begin with an underscore."""

    def __init__(self, made_by: Class, homes: Homes) -> None:
        self._class, (self._home, self._number) = made_by, homes.next_place()
        self._generation = 0  # of the process that it was made in
        weakref.finalize(self, self._home.dropped.append, self._number).atexit = False

    def __getattr__(self, name: str) -> _Method:
        if name not in self._class.methods and name != "reset":
            raise AttributeError(name)
        return _Method(self, name, self._class.methods.get(name, inspect.Signature()))

    def _call(self, name: str, values: tuple, named: dict[str, Any]) -> Any:
        home, own = self._home, self._class
        with home.turn():
            if name == "reset":
                self._make()
            elif not home.is_running or self._generation != home.generation:
                raise ApartError(f"was not called: the environment is gone: {home.how_it_ended}")
            is_shown = name in own.is_shown
            answer = home.ask("call", home.timeout, number=self._number, name=name, values=values, named=named,
                              max_chars=own.max_chars if is_shown else None)
            return answer if is_shown else restored(answer)

    def _make(self) -> None:
        self._home.run()
        if self._generation == self._home.generation:
            return
        dropped, self._home.dropped[:] = list(self._home.dropped), []
        try:
            self._home.ask("make", START_SECONDS, number=self._number, source=self._class.source,
                           options=dict(self._class.options), dropped=dropped)
        except (ApartError, LateError) as error:
            raise ApartError(f"was not called: the environment's constructor: {error}") from None
        self._generation = self._home.generation


@dataclass(frozen=True)
class _Method:
    own: IsolatedObject
    name: str
    __signature__: inspect.Signature

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.own._call(self.name, values, named)


@dataclass(frozen=True)
class IsolatedTool:
    """A plain function in another process. What it answers comes back as text."""

    homes: Homes
    source: Source
    max_chars: int
    __signature__: inspect.Signature = field(compare=False)

    def __call__(self, **named: Any) -> str:
        with self.homes.idle() as home:
            home.run()
            return home.ask("use", home.timeout, source=self.source, named=named, max_chars=self.max_chars)


def lane_of(own: object) -> Home | None:
    """What the calls of an instance wait for; None of one in this process."""
    return own._home if isinstance(own, IsolatedObject) else None


def restored(value: Any) -> Any:
    """What `isolated_worker.carried` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind == "dict":
        return {restored(k): restored(v) for k, v in parts}
    if kind == "other":
        return foreign({"type": parts[0], "shown": parts[1]})
    make: Callable[[Any], Any] = tuple if kind == "tuple" else list
    return make(map(restored, parts))
