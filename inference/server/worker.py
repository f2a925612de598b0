"""The engine thread, in which all models of a server compute; requests enter and leave between decode steps."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.engine.decode.serving import Serving
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.inference.sequence_scores import ScoredToken, SequenceScorer
from hybrid_rlhf.inference.server.protocol import ApiError

# Readers do not notice more than thirty deliveries a second, and each takes the interpreter lock from the engine
# thread, and a core from its matrix products.
DELIVERY_SECONDS = 0.03
T = TypeVar("T")
_log = logging.getLogger(__name__)
# (index of the request in its job, its new tokens, whether it has ended), or the error of the whole job.
Event = tuple[int, list[int], bool] | Exception


class Stopping(RuntimeError):
    """The thread has ended or is stopping."""

    def __init__(self) -> None:
        super().__init__("the server stops")


@dataclass
class GenerationJob:
    """The requests of one client, and the queue of their tokens. loop: the event loop that reads it."""

    requests: list[Request]
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    sent: list[int] = field(default_factory=list)  # tokens delivered of each request; -1: finished or dropped

    def __post_init__(self) -> None:
        self.sent = [0] * len(self.requests)


@dataclass
class ModelQueue:
    """One model: its engine, at most num_slots requests of `capacity` tokens at once, the running jobs, and sequences
    to be scored between their steps (readings)."""

    engine: HybridEngine
    num_slots: int
    capacity: int
    serving: Serving | None = None
    jobs: list[GenerationJob] = field(default_factory=list)
    readings: deque[Callable[[], None]] = field(default_factory=deque)
    scorer: SequenceScorer | None = None
    delivered_at: float = 0.0  # when all new tokens were last delivered

    def running(self) -> Serving:
        """What serves it; ApiError 503 after an error, until it is made anew."""
        if self.serving is None:
            raise ApiError(503, "the model learns, or its engine starts again; try again", retry_after=1)
        return self.serving


class Worker:
    """Steps the models (lanes) in turn while there are jobs or readings.

    `submit`, `drop` and `call` may be called from any thread; they take effect before the next step. The tokens of one
    step are sent to each event loop in one call.
    """

    def __init__(self, lanes: list[ModelQueue]) -> None:
        self.lanes = lanes
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = self._has_ended = False
        self._modes = ExitStack()  # inference mode of all models
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)

    def start(self) -> None:
        """Enter inference mode; returns when requests are accepted. Raises the error of a failed start."""
        self._thread.start()
        self._ready.result()

    def draw_first(self) -> None:
        """Warm up: sample two tokens of each model. It allocates the caches of all slots and compiles kernels, so that
        no request waits for it, and too little memory fails at the start."""
        for lane in self.lanes:
            self.call(partial(_draw, lane, min(2, lane.capacity - 1))).result()

    def stop(self) -> None:
        """End the thread after the current step, and wait for it. Open and later requests get Stopping."""
        self._orders.put(self._stop)
        self._thread.join(timeout=60)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_stopping

    def submit(self, lane: ModelQueue, job: GenerationJob) -> None:
        self._order(lambda: self._submit(lane, job))

    def drop(self, lane: ModelQueue, job: GenerationJob, indexes: range | None = None) -> None:
        """Cancel a job, or some of its requests: their slots are free before the next step."""
        self._order(lambda: self._drop(lane, job, indexes))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` between two steps, in the engine thread."""
        result: Future[T] = Future()
        self._order(self._answering(result, function))
        return result

    def call_outside(self, function: Callable[[], T]) -> Future[T]:
        """Run `function`, which may train, in the engine thread outside of inference mode. It fails with ApiError 409
        while an answer is drawn; the caches are made anew behind it."""

        def call() -> T:
            if any(lane.jobs or lane.readings for lane in self.lanes):
                raise ApiError(409, "an answer is being drawn; wait for its end")
            self._leave()
            try:
                return function()
            finally:
                try:
                    self._enter()
                except BaseException:
                    self._is_stopping = True  # /health says so, where each question would be told to try again
                    _log.exception("the models cannot answer again; what was learnt is kept")
                    raise

        return self.call(call)

    def score(self, lane: ModelQueue, ids: list[int], first: int, num_top: int,
              with_next: bool) -> Future[list[ScoredToken]]:
        """SequenceScorer.score; one sequence at a time between two steps, so that answers continue."""
        result: Future[list[ScoredToken]] = Future()
        reading = self._answering(result, lambda: self._score(lane, ids, first, num_top, with_next))
        self._order(lambda: lane.readings.append(reading))
        return result

    def _answering(self, result: Future[T], function: Callable[[], T]) -> Callable[[], None]:
        def answer() -> None:
            if not result.set_running_or_notify_cancel():
                return
            try:
                if self._is_stopping:
                    raise Stopping
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        return answer

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        if self._has_ended:
            self._refuse_orders()

    def _refuse_orders(self) -> None:
        """Run the remaining orders, all of which fail with Stopping."""
        with suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()
        for lane in self.lanes:
            with suppress(IndexError):  # another thread may be here too
                while True:
                    lane.readings.popleft()()

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._modes:
                self._enter()
                self._ready.set_result(None)
                self._turn_until_stopped()
                self._leave()
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
                return
            _log.exception("the engine's thread has ended")
        finally:
            self._is_stopping = True
            for lane in self.lanes:
                self._fail(lane, Stopping())
            self._has_ended = True
            self._refuse_orders()

    def _enter(self) -> None:
        for lane in self.lanes:
            self._modes.enter_context(lane.engine.inference())
            lane.serving = lane.engine.serve(lane.num_slots, lane.capacity)

    def _leave(self) -> None:
        for lane in self.lanes:
            lane.serving = lane.scorer = None
        self._modes.close()

    def _turn_until_stopped(self) -> None:
        while not self._is_stopping:
            is_busy = any(lane.jobs or lane.readings for lane in self.lanes)
            try:
                order = self._orders.get(block=not is_busy)
                while not self._is_stopping:
                    order()
                    order = self._orders.get_nowait()
            except queue.Empty:
                pass
            for lane in self.lanes:
                if lane.readings:
                    lane.readings.popleft()()
                if lane.jobs:
                    self._step(lane)

    def _score(self, lane: ModelQueue, ids: list[int], first: int, num_top: int,
               with_next: bool) -> list[ScoredToken]:
        lane.scorer = lane.scorer or SequenceScorer(lane.engine, lane.capacity)
        try:
            return lane.scorer.score(ids, first, num_top, with_next)
        except Exception as error:
            lane.scorer = None  # frees its slot, in case memory ran out
            if not isinstance(error, UserError):
                _log.exception("scoring tokens failed")
            raise

    def _stop(self) -> None:
        self._is_stopping = True

    def _submit(self, lane: ModelQueue, job: GenerationJob) -> None:
        lane.jobs.append(job)
        if self._is_stopping:
            self._fail(lane, Stopping())
            return
        for request in job.requests:
            lane.serving.submit(request)

    def _drop(self, lane: ModelQueue, job: GenerationJob, indexes: range | None) -> None:
        if not any(job is other for other in lane.jobs):
            return
        for i in range(len(job.requests)) if indexes is None else indexes:
            if job.sent[i] >= 0:
                lane.serving.drop(job.requests[i])
                job.sent[i] = -1
        self._forget_done(lane)

    def _forget_done(self, lane: ModelQueue) -> None:
        lane.jobs = [job for job in lane.jobs if any(sent >= 0 for sent in job.sent)]

    def _step(self, lane: ModelQueue) -> None:
        try:
            lane.serving.step()
        except Exception as error:  # the server survives any error of a forward
            if not isinstance(error, UserError):
                _log.exception("a decode step failed")
            self._fail(lane, error)
            lane.serving = None
        else:
            self._deliver_tokens(lane)
            return
        # outside of `except` the error's frames, and so the old cache, are freed before the next one is made
        lane.serving = lane.engine.serve(lane.num_slots, lane.capacity)

    def _deliver_tokens(self, lane: ModelQueue) -> None:
        """Send new tokens to their jobs: first and last ones at once, others in batches."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Queue, Event]]] = {}
        has_ended, is_time = False, time.monotonic() - lane.delivered_at >= DELIVERY_SECONDS
        for job in lane.jobs:
            for i, request in enumerate(job.requests):
                sent, count = job.sent[i], len(request.tokens)
                if sent < 0 or count == sent:
                    continue
                is_last = count >= request.limit or request.tokens[-1] in lane.serving.stops
                if sent and not (is_last or is_time):
                    continue
                news.setdefault(job.loop, []).append((job.events, (i, request.tokens[sent:], is_last)))
                job.sent[i] = -1 if is_last else count
                has_ended |= is_last
        if has_ended:
            self._forget_done(lane)
        if is_time:
            lane.delivered_at = time.monotonic()
        for loop, events in news.items():
            _deliver(loop, events)

    def _fail(self, lane: ModelQueue, error: Exception) -> None:
        jobs, lane.jobs = lane.jobs, []
        for job in jobs:
            _deliver(job.loop, [(job.events, error)])


def _draw(lane: ModelQueue, limit: int) -> None:
    if limit:
        begin = min(lane.serving.stops, default=0)
        lane.serving.submit(Request(0, [begin], limit, sampling=SamplingConfig(max_new_tokens=limit)))
        for _ in range(limit + 1):  # a step samples a token or more; the last step is empty
            lane.serving.step()


def _deliver(loop: asyncio.AbstractEventLoop, events: list[tuple[asyncio.Queue, Event]]) -> None:
    def put() -> None:
        for waiting, event in events:
            waiting.put_nowait(event)

    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(put)
