"""Calls of environments and tools: side by side, each within its time, and whatever they do becomes an answer."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from hybrid_rlhf.core.text_safety import escape_control, shortened
from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.environments.event_loop import EventLoop
from hybrid_rlhf.rewards.deadline import Overdue, within
from hybrid_rlhf.rewards.function_worker import no_second_process, one_line
from hybrid_rlhf.rewards.process_state import unchanged

_WHO = "the environment"


class CallError(Exception):
    """A call that failed, in one line that can be shown to a model."""


class Outcome(NamedTuple):
    """What became of a call. error: why there is no value, in one line, or None. is_late: its time was up."""

    value: Any = None
    error: str | None = None
    is_late: bool = False


@dataclass(eq=False)
class _Job:
    key: Hashable
    call: Callable[[], object]
    then: Callable[[Any], object]
    began: float = 0.0  # by time.monotonic
    is_given_up: bool = False
    is_in_loop: bool = False  # its coroutine runs, and no worker waits for it
    cancel: Callable[[], None] | None = None


class CallPool:
    """Up to `num_workers` calls at a time, and any number of coroutines, each of which may take `timeout` seconds from
    when it begins.

    A call that hangs is left behind in its thread, which another one replaces: there are never more threads than
    num_workers, one for coroutines, and those that hang. With num_workers 0 `start` makes the call itself, so that
    calls follow one another in an order that no clock decides; in the main thread a hanging call is ended then, and
    what a call changes of this process (random generators, torch's settings) is restored. Methods are for one thread.
    """

    def __init__(self, num_workers: int, timeout: float) -> None:
        self._num_workers, self._timeout = num_workers, timeout
        self._changed = threading.Condition()  # guards what follows
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._running: list[_Job] = []
        self._done: list[tuple[Any, Outcome]] = []
        self._num_threads = 0  # workers that do not hang
        self._num_waiting = 0
        self._is_closed = False
        self._loop = EventLoop()

    @property
    def num_waiting(self) -> int:
        """Calls that were started and that `finished` has not returned."""
        return self._num_waiting

    def start(self, key: Hashable, call: Callable[[], object], then: Callable[[Any], object] | None = None) -> None:
        """Have `call` made. Where it returns a coroutine, that is awaited in an event loop of the pool's.

        key: by which `finished` names it. then: what is made of the value, within the same time; its answer is the
        Outcome's value.
        """
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        job = _Job(key, call, then or (lambda value: value))
        if self._num_workers:
            with self._changed:
                self._add_worker()
            self._jobs.put(job)
        else:
            self._run_here(job)
        self._num_waiting += 1

    def finished(self, wait: bool) -> list[tuple[Any, Outcome]]:
        """(key, Outcome) of the calls that have ended, or whose time is up, since this was last asked, in the order in
        which they ended. wait: until there is at least one, or nothing is waiting."""
        with self._changed:
            while True:
                now = time.monotonic()
                for job in [job for job in self._running if now - job.began > self._timeout]:
                    self._give_up(job)
                if self._done or not wait or not self._num_waiting:
                    found, self._done = self._done, []
                    self._num_waiting -= len(found)
                    return found
                first = min((job.began for job in self._running), default=None)
                self._changed.wait(None if first is None else max(first + self._timeout - now, 0) + 1e-3)

    def close(self) -> None:
        """Waits for nothing: what has not begun is dropped, coroutines are cancelled, and threads end with their
        calls."""
        with self._changed:
            self._is_closed = True
            try:
                while True:
                    self._jobs.get_nowait()
            except Empty:
                pass
            for _ in range(self._num_threads):
                self._jobs.put(None)
            for job in list(self._running):
                self._give_up(job)
            self._done, self._num_waiting = [], 0
        self._loop.close()

    def _add_worker(self) -> None:
        if self._num_threads < self._num_workers and not self._is_closed:
            self._num_threads += 1
            threading.Thread(target=self._work, name="environment call", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._changed:
                job.began = time.monotonic()
                self._running.append(job)
                self._changed.notify()  # `finished` has a new time to wait for
            answer = _attempt(job)
            with self._changed:
                if job.is_given_up:  # another thread has this one's place
                    _drop(answer)
                    return
                if isinstance(answer, Outcome):
                    self._end(job, answer)
                    continue
                job.is_in_loop = True
            self._await(job, answer)

    def _run_here(self, job: _Job) -> None:
        with unchanged(_WHO):
            job.began = time.monotonic()
            try:
                answer = within(self._timeout, lambda: _attempt(job))
            except Overdue:
                answer = self._late()
            with self._changed:
                self._running.append(job)
                if isinstance(answer, Outcome):
                    return self._end(job, answer)
                job.is_in_loop = True
            self._await(job, answer)
            with self._changed:
                try:
                    self._changed.wait_for(lambda: job not in self._running,
                                           job.began + self._timeout - time.monotonic())
                finally:
                    if job in self._running:
                        self._give_up(job)

    def _await(self, job: _Job, answer: Awaitable) -> None:
        cancel = self._loop.start(self._finish(job, answer))
        with self._changed:
            job.cancel = cancel
            if job.is_given_up:
                cancel()

    async def _finish(self, job: _Job, answer: Awaitable) -> None:
        try:
            with no_second_process(_WHO):
                outcome = Outcome(job.then(await answer))
        except BaseException as error:
            outcome = Outcome(None, described(error))
        with self._changed:
            if not job.is_given_up:
                self._end(job, outcome)

    def _end(self, job: _Job, outcome: Outcome) -> None:
        self._running.remove(job)
        self._done.append((job.key, self._late() if time.monotonic() - job.began > self._timeout else outcome))
        self._changed.notify()

    def _give_up(self, job: _Job) -> None:
        job.is_given_up = True
        self._running.remove(job)
        self._done.append((job.key, self._late()))
        if not job.is_in_loop:
            self._num_threads -= 1
            self._add_worker()
        elif job.cancel is not None:
            job.cancel()

    def _late(self) -> Outcome:
        return Outcome(None, f"no answer within {self._timeout:g} s (environment.timeout)", True)


def described(error: BaseException) -> str:
    """What a call raised, in one line that is safe to show."""
    try:
        said = str(error) if isinstance(error, CallError) else f"raised {type(error).__name__}: {one_line(error)}"
        return escape_control(clean(shortened(" ".join(said.split()), 1000)))
    except BaseException:  # someone else's __str__
        return "raised an error that cannot be shown"


def _attempt(job: _Job) -> Outcome | Awaitable:
    """What the call has come to, or what is to be awaited. Raises only what the user has done: KeyboardInterrupt in the
    main thread."""
    try:
        with no_second_process(_WHO):
            value = job.call()
            return value if inspect.isawaitable(value) else Outcome(job.then(value))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return Outcome(None, described(error))


def _drop(answer: Outcome | Awaitable) -> None:
    """A coroutine that nobody waits for any more is closed: Python warns of one that was never awaited."""
    if inspect.iscoroutine(answer):
        answer.close()
