"""Sequences of several turns: a request ends, the caller adds tokens, and another request continues it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.engine.decode.hf_batches import GenerateBatches
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.scheduler import Scheduler


class Turns(Protocol):
    """Runs sequences of several turns. stops: tokens that end a turn and are its last one. Requests may go on
    (`Request.may_go_on`): the next one of a sequence (`request.following`) may be submitted at any later time. Until
    then, or `release`, the columns are kept where there is room for them."""

    stops: frozenset[int]

    def submit(self, request: Request) -> None: ...

    def release(self, request: Request) -> None:
        """Free a request's columns: none will follow it."""

    def step(self) -> list[Request]:
        """Draw at least one token for all that may run; returns those that have ended, in an order that does not depend
        on timing. Raises UserError for logits that are not finite."""

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""


class SlotTurns:
    """Turns over the slots of one cache. open_scheduler: opens a scheduler with as many slots as fit. shrink: called
    where memory ran out; raises UserError where no fewer slots are left to try. Running turns are then drawn again from
    their beginning, with the same tokens. note: called with the cache's bytes (it is allocated at the first token) and
    the number of preemptions so far, whenever a turn ends."""

    def __init__(self, open_scheduler: Callable[[], Scheduler], shrink: Callable[[Exception], None],
                 note: Callable[[int, int], None]) -> None:
        self._open, self._shrink, self._note = open_scheduler, shrink, note
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
            self._note(self._running.cache.num_bytes(), self._running.num_preempted)
            ended_ids = {id(request) for request in ended}
            self._live = [request for request in self._live if id(request) not in ended_ids]
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
    """Turns by transformers' generate, for models that do not run over slots: a step draws all waiting requests to
    their end, and reads their prompts from the start. note_bytes: called with the bytes of a step's largest cache.
    """

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
        """Does nothing: no columns are kept."""

    def step(self) -> list[Request]:
        drawn, self._waiting = self._waiting, []
        self._note_bytes(self._batches.run(drawn))
        return drawn
