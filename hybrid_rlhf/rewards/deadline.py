"""Timeouts for calls of a user's code in this process."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from hybrid_rlhf.core.function_worker import one_line

T = TypeVar("T")

_EVERY, _PATIENCE = 0.1, 1.0  # seconds between two signals, and until they come without pause


class Overdue(TimeoutError):
    """A call exceeded its timeout."""


class _Expired(BaseException):
    """Raised inside the call. Not an Exception: `except Exception` in the called code must not swallow it."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """`call()`, or Overdue after `seconds` of wall time. What it raises is raised here.

    In the main thread a timer signal (SIGALRM) interrupts the call, even inside a regular expression, and repeats for
    code that catches every exception. A call that installs its own handler of SIGALRM loses this protection meanwhile;
    if it returns too late, it is Overdue all the same. Elsewhere the call runs in a thread of its own, which is
    abandoned at the timeout.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer") and not _has_loop():
        return _alarmed(seconds, call)
    return _beside(seconds, call)


def _has_loop() -> bool:
    """Whether an event loop runs in this thread, as in a notebook: a second one cannot run there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _alarmed(seconds: float, call: Callable[[], T]) -> T:
    here, began, is_over = inspect.currentframe(), time.monotonic(), False

    def expire(_number: int, frame: FrameType | None) -> None:
        if is_over or frame is None or frame is here or frame.f_code is expire.__code__:
            return  # no code of the call was interrupted
        if time.monotonic() - began > seconds + _PATIENCE:
            # Clean-up had its time. One of the next signals comes while `except:` handles this one, where nothing
            # catches it; at regular intervals they might all come during the same wait.
            signal.setitimer(signal.ITIMER_REAL, (1 + time.perf_counter_ns() % 20) * 1e-6, 1e-3)
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    waiting = signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
    try:
        answer = call()
    except BaseException as error:
        is_over = True
        if isinstance(error, _Expired):
            raise Overdue(f"no answer within {seconds:g} s") from None
        if time.monotonic() - began > seconds and not isinstance(error, KeyboardInterrupt):
            raise Overdue(f"no answer within {seconds:g} s (then it raised {type(error).__name__}: "
                          f"{one_line(error)})") from error
        raise
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, *waiting)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began > seconds:  # it swallowed the signal, or disabled it
        raise Overdue(f"no answer within {seconds:g} s")
    return answer


def _beside(seconds: float, call: Callable[[], T]) -> T:
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # raised again by the caller
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Overdue(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]
