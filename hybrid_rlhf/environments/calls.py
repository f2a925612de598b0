"""Concurrent calls of environments and tools, each with a timeout and one outcome."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from hybrid_rlhf.core.errors import escape_control, shortened
from hybrid_rlhf.core.function_worker import no_second_process, one_line, text_of
from hybrid_rlhf.data.messages import clean
from hybrid_rlhf.rewards.user_code import Overdue, unchanged, within

_WHO = "the environment"
_PATIENCE = 1.0  # seconds within which a loop must cancel a coroutine


class CallError(Exception):
    """A failed call; the message is one line that can be shown to a model."""


class LateError(CallError):
    """A call that enforces its own timeout (`keep_time`) exceeded it."""


class Outcome(NamedTuple):
    """The result of a call. error: why there is no value, in one line, or None. is_late: whether it timed out."""

    value: Any = None
    error: str | None = None
    is_late: bool = False


@dataclass(eq=False)
class _Job:
    """A call. Each lock is acquired once, for good: by the call when it ends, or by the clock that gives it up. Nothing
    else is shared with its thread, which may therefore be interrupted anywhere."""

    key: Hashable
    call: Callable[[], object]
    then: Callable[[Any], object]
    lane: Hashable = None
    keeps_time: bool = False
    began: float | None = None  # by time.monotonic
    thread_id: int | None = None
    is_given_up: bool = False
    cancel: Callable[[], None] | None = None  # of its coroutine
    has_outcome: threading.Lock = field(default_factory=threading.Lock)
    has_left_worker: threading.Lock = field(default_factory=threading.Lock)

    def due(self, timeout: float) -> float:
        """Its deadline; a full timeout from now for a call that has not begun, or that enforces its own timeout."""
        return (time.monotonic() if self.began is None or self.keeps_time else self.began) + timeout


_thread = threading.local()  # job: the call of a pool's thread


def keep_time() -> None:
    """Declare that the call in this thread enforces its own timeout, by LateError, and is not to be interrupted. With
    num_workers 0 the pool's clock applies all the same."""
    if getattr(_thread, "job", None) is not None:
        _thread.job.keeps_time = True


class CallPool:
    """Up to `num_workers` calls at a time, and any number of coroutines, each with `timeout` seconds from when it
    begins.

    A call that hangs is abandoned in its thread, which another one replaces: there are never more threads than
    num_workers, one for coroutines, and those that hang. An endless loop of Python code is then interrupted. With
    num_workers 0 `start` makes the call itself, so that the order of calls does not depend on time; in the main thread
    a call is interrupted at its timeout, and the process state that it changes (random generators, torch's settings)
    is restored. The methods are for one thread.
    """

    def __init__(self, num_workers: int, timeout: float) -> None:
        self._num_workers, self._timeout = num_workers, timeout
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[_Job, Outcome]] = SimpleQueue()
        self._open: dict[_Job, None] = {}  # in the order of start
        self._lanes: dict[Hashable, deque[_Job]] = {}  # lanes with a running call, and the calls that wait for its end
        self._done: list[tuple[Any, Outcome]] = []
        self._num_threads = 0  # workers that do not hang
        self._is_closed = False
        self._loop: _LoopThread | None = None  # of coroutines, from the first one on
        self._loop_lock = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Calls that were started and that `finished` has not returned."""
        return len(self._open) + len(self._done)

    def start(self, key: Hashable, call: Callable[[], object], then: Callable[[Any], object] | None = None,
              lane: Hashable = None) -> None:
        """Start `call`. If it returns a coroutine, that is awaited in an event loop of the pool's.

        key: its name in `finished`. then: is applied to the value, within the same timeout; its result is the Outcome's
        value. lane: calls of one lane run one after another, and occupy no worker while they wait; None: no lane.
        """
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        job = _Job(key, call, then or (lambda value: value), lane)
        if not self._num_workers:
            return self._run_here(job)
        self._open[job] = None
        if lane in self._lanes:
            self._lanes[lane].append(job)
            return None
        if lane is not None:
            self._lanes[lane] = deque()
        return self._hand_out(job)

    def _hand_out(self, job: _Job) -> None:
        self._add_worker()
        self._jobs.put(job)

    def finished(self, wait: bool) -> list[tuple[Any, Outcome]]:
        """(key, Outcome) of the calls that have ended or timed out since the last call of this, in the order in which
        they ended. wait: whether to wait until there is at least one, or nothing is waiting."""
        while True:
            while not self._answers.empty():
                self._end(*self._answers.get())
            now = time.monotonic()
            for job in [job for job in self._open if job.due(self._timeout) < now]:
                self._give_up(job)
            if self._done or not wait or not self._open:
                done, self._done = self._done, []
                return done
            seconds = min(job.due(self._timeout) for job in self._open) - now
            with suppress(Empty):
                self._end(*self._answers.get(timeout=max(seconds, 0) + 1e-3))

    def close(self) -> None:
        """Does not wait: calls that have not begun are dropped, running ones are given up."""
        self._is_closed = True
        for waiting in self._lanes.values():
            for job in waiting:
                del self._open[job]
        self._lanes = {}
        with suppress(Empty):
            while (unbegun := self._jobs.get_nowait()) is not None:
                del self._open[unbegun]
        for job in list(self._open):
            self._give_up(job)
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self._open, self._done = {}, []
        with self._loop_lock:
            if self._loop is not None:
                self._loop.retire()
            self._loop = None

    def _add_worker(self) -> None:
        if self._num_threads < self._num_workers and not self._is_closed:
            self._num_threads += 1
            threading.Thread(target=self._work, name="environment call", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _thread.job = job
            job.thread_id, job.began = threading.get_ident(), time.monotonic()
            answer = _attempt(job)
            if not job.has_left_worker.acquire(blocking=False):  # another thread has replaced this one
                _drop(answer)
                return
            if isinstance(answer, Outcome):
                self._put(job, answer)
            else:
                self._await(job, answer)

    def _run_here(self, job: _Job) -> None:
        with unchanged(_WHO):
            job.began = time.monotonic()
            try:
                answer = within(self._timeout, lambda: _attempt(job))
            except Overdue:
                answer = self._late()
            self._open[job] = None
            if isinstance(answer, Outcome):
                return self._end(job, answer)
            job.has_left_worker.acquire()
            self._await(job, answer)
            try:
                with suppress(Empty):
                    self._end(*self._answers.get(timeout=max(job.due(self._timeout) - time.monotonic(), 0)))
            finally:
                if job in self._open:
                    self._give_up(job)

    def _await(self, job: _Job, answer: Awaitable) -> None:
        spent = time.monotonic() - (job.began or 0)
        job.began = None  # waiting for a loop that is not blocked does not count against the call
        with self._loop_lock:
            if self._loop is not None and not self._loop.answers():
                self._loop.retire()
                _interrupt(self._loop.thread.ident)
                self._loop = None
            if self._loop is None:
                self._loop = _LoopThread()
            job.cancel = self._loop.start(self._finish(job, answer))
        job.began = time.monotonic() - spent
        if job.is_given_up:
            job.cancel()

    async def _finish(self, job: _Job, answer: Awaitable) -> None:
        try:
            with no_second_process(_WHO):
                outcome = Outcome(job.then(await answer))
        except BaseException as error:
            outcome = Outcome(None, described(error))
        self._put(job, outcome)

    def _put(self, job: _Job, outcome: Outcome) -> None:
        if job.has_outcome.acquire(blocking=False):
            self._answers.put((job, self._late() if job.due(self._timeout) < time.monotonic() else outcome))

    def _end(self, job: _Job, outcome: Outcome) -> None:
        del self._open[job]
        self._done.append((job.key, outcome))
        if job.lane in self._lanes:
            waiting = self._lanes[job.lane]
            if waiting:
                self._hand_out(waiting.popleft())
            else:
                del self._lanes[job.lane]

    def _give_up(self, job: _Job) -> None:
        """Give up a call, unless its outcome has just arrived."""
        if not job.has_outcome.acquire(blocking=False):
            return
        job.is_given_up = True
        self._end(job, self._late())
        if job.has_left_worker.acquire(blocking=False):
            if not job.keeps_time:
                _interrupt(job.thread_id)
            self._num_threads -= 1
            self._add_worker()
        elif job.cancel is not None:
            job.cancel()

    def _late(self) -> Outcome:
        return Outcome(None, f"no answer within {self._timeout:g} s (environment.timeout)", True)


def described(error: BaseException) -> str:
    """The error of a call, in one line that is safe to show."""
    message = str(error) if isinstance(error, CallError) else f"raised {type(error).__name__}: {one_line(error)}"
    return escape_control(clean(shortened(" ".join(message.split()), 1000)))


def shown(value: object, max_chars: int) -> str:
    """`value` as the content of a message: text as it is, texts of content blocks joined, else JSON, else str(value).

    Bytes are only mentioned. Control characters and lone surrogates are replaced by visible ones. At most `max_chars`
    characters, and then a line that says where it was cut.
    """
    text = text_of(value, max_chars)
    safe = escape_control(clean(text.replace("\r\n", "\n")))
    if len(text) <= max_chars and len(safe) <= max_chars:
        return safe
    return f"{safe[:max_chars]}\n[cut here: only the first {max_chars} characters of the answer are shown]"


def _attempt(job: _Job) -> Outcome | Awaitable:
    """Make the call: its outcome, or its coroutine. Raises only a KeyboardInterrupt of the main thread."""
    try:
        with no_second_process(_WHO):
            value = job.call()
            return value if inspect.isawaitable(value) else Outcome(job.then(value))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return Outcome(None, described(error), isinstance(error, LateError))


def _drop(answer: Outcome | Awaitable) -> None:
    """Close a coroutine that is no longer needed: Python warns of one that was never awaited."""
    if inspect.iscoroutine(answer):
        answer.close()


def _interrupt(thread_id: int | None) -> None:
    """Raise SystemExit in that thread, so that an endless loop does not slow down the rest of the run. It is raised at
    the next Python instruction: a wait in C (a sleep, a socket) ends first."""
    if thread_id is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(SystemExit))


class _LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_over = False
        self._heard: threading.Event | None = None
        self.thread = threading.Thread(target=self._run, name="environment event loop", daemon=True)
        self.thread.start()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Callable[[], None]:
        """Start it, and return at once a function that cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)

        def cancel() -> None:
            future.cancel()
            heard = threading.Event()
            self._loop.call_soon_threadsafe(heard.set)
            self._heard = heard

        return cancel

    def answers(self) -> bool:
        """Whether it responds after the last cancellation: false if a coroutine blocks it."""
        return self._heard is None or self._heard.wait(_PATIENCE)

    def retire(self) -> None:
        """Stop it when its coroutines, which were cancelled before, have ended."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._is_over:
            with suppress(BaseException):  # SystemExit of one task: the others go on
                self._loop.run_forever()
        self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        self._is_over = True
        self._loop.stop()
