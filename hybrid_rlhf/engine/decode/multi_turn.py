"""Sequences of several turns: a request ends, somebody adds tokens, and another request goes on where it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hybrid_rlhf.core.out_of_memory import is_out_of_memory
from hybrid_rlhf.engine.decode.hf_batches import GenerateBatches
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.scheduler import Scheduler


class Turns(Protocol):
    """stops: tokens that end a turn and are its last one. Requests may go on (`Request.may_go_on`), and the next one of
    a sequence (`request.following`) is submitted at any time later; until then, or `release`, its columns are kept
    where there is room for them."""

    stops: frozenset[int]

    def submit(self, request: Request) -> None: ...

    def release(self, request: Request) -> None:
        """Nothing will follow this one."""

    def step(self) -> list[Request]:
        """At least one token for all that may run; those that have ended, in no order that the clock decides.
        UserError for logits that are not finite."""

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""


class SlotTurns:
    """Over the slots of one cache. open_scheduler: over as many slots as fit. shrink: called where memory ran out;
    raises UserError where no fewer slots remain to be tried. What runs is then drawn again from the beginning of its
    turn, and draws the same. note_bytes: told how much the cache holds, whenever a turn ends (it is made when the first
    token is read)."""

    def __init__(self, open_scheduler: Callable[[], Scheduler], shrink: Callable[[Exception], None],
                 note_bytes: Callable[[int], None]) -> None:
        self._open, self._shrink, self._note_bytes = open_scheduler, shrink, note_bytes
        self._live: list[Request] = []
        self._start()

    def _start(self) -> None:
        failure: Exception | None = None
        try:
            self._scheduler: Scheduler | None = self._open()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # its frames hold memory
        if failure is not None:
            self._shrink(failure)
            self._start()

    @property
    def stops(self) -> frozenset[int]:
        return self._running.stops

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    @property
    def _running(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler

    def submit(self, request: Request) -> None:
        self._live.append(request)
        self._running.submit([request])

    def release(self, request: Request) -> None:
        self._running.release(request)

    def step(self) -> list[Request]:
        failure: Exception | None = None
        try:
            self._running.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
        if failure is not None:
            self._restart(failure)
            return []
        ended, self._running.ended = self._running.ended, []
        if ended:
            self._note_bytes(self._running.cache.num_bytes())
            gone = {id(request) for request in ended}
            self._live = [request for request in self._live if id(request) not in gone]
        return ended

    def _restart(self, failure: Exception) -> None:
        self._scheduler = None
        self._shrink(failure)
        self._start()
        for request in self._live:
            request.tokens.clear()
            request.logprobs.clear()
            request.kept.clear()
            request.follows = None
        self._running.submit(self._live)


class BatchTurns:
    """By transformers' generate, for models that do not run over slots: all that wait are drawn to their end, whatever
    was said before them is read again. note_bytes: told how much the largest cache of a step held."""

    def __init__(self, batches: GenerateBatches, note_bytes: Callable[[int], None]) -> None:
        self._batches, self.stops, self._note_bytes = batches, batches.stops, note_bytes
        self._waiting: list[Request] = []

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, request: Request) -> None:
        request.follows = None
        self._waiting.append(request)

    def release(self, request: Request) -> None:
        """Nothing is kept."""

    def step(self) -> list[Request]:
        drawn, self._waiting = self._waiting, []
        self._note_bytes(self._batches.run(drawn))
        return drawn
