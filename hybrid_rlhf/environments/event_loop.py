"""Coroutines of someone else's, in an event loop that outlives those which block it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hybrid_rlhf.environments.hung_threads import interrupt

_PATIENCE = 1.0  # seconds until a loop that was asked to cancel something must have heard it


class EventLoop:
    """One event loop in a daemon thread, started when it is first needed.

    What a coroutine does must not end or hold up the others: where one blocks the thread (time.sleep, an endless loop)
    and its caller cancels it, the next coroutine gets a new loop, and the old thread ends once it is free again (an
    endless loop is ended).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: _LoopThread | None = None

    def start(self, coroutine: Coroutine[Any, Any, None]) -> Callable[[], None]:
        """Run it, and return at once; the answer is a function that cancels it."""
        with self._lock:
            if self._thread is not None and not self._thread.answers():
                self._thread.retire()
                interrupt(self._thread.thread.ident)
                self._thread = None
            if self._thread is None:
                self._thread = _LoopThread()
            thread = self._thread
            future = asyncio.run_coroutine_threadsafe(coroutine, thread.loop)

        def cancel() -> None:
            future.cancel()
            thread.ask()

        return cancel

    def close(self) -> None:
        """The thread ends when the coroutines of its loop have, which their callers cancel before."""
        with self._lock:
            if self._thread is not None:
                self._thread.retire()
            self._thread = None


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._is_retired = False
        self._heard: threading.Event | None = None
        self.thread = threading.Thread(target=self._run, name="environment event loop", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_retired:
            with suppress(BaseException):  # SystemExit of a task that a coroutine has started: the others go on
                self.loop.run_forever()
        self.loop.close()

    def ask(self) -> None:
        """For a sign of life, which `answers` waits for."""
        heard = threading.Event()
        self.loop.call_soon_threadsafe(heard.set)
        self._heard = heard

    def answers(self) -> bool:
        return self._heard is None or self._heard.wait(_PATIENCE)

    def retire(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self.loop)

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)
        self._is_retired = True
        self.loop.stop()
