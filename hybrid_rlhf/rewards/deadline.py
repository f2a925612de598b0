"""Calls of someone else's code that must end in time."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Overdue(TimeoutError):
    """A call took longer than it may."""


class _Expired(BaseException):
    """Raised inside the call. No Exception: a `try: ... except Exception` of the called code must not eat it."""


def within(seconds: float, call: Callable[[], object]) -> object:
    """`call()`, or Overdue after `seconds` of wall time. What it raises is raised here.

    In the main thread a timer signal (SIGALRM) ends the call, in the midst of a regular expression too; a call that
    takes that signal for itself loses this protection while it has it. Elsewhere the call runs in a thread of its own,
    which is left behind when its time is up.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer") and not _has_loop():
        return _alarmed(seconds, call)
    return _beside(seconds, call)


def _has_loop() -> bool:
    """Whether an event loop runs in this thread (a notebook's): a second one cannot."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _alarmed(seconds: float, call: Callable[[], object]) -> object:
    def expire(_number: int, _frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    waiting, every = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    except _Expired:
        raise Overdue(f"no answer within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, waiting, every)
        signal.signal(signal.SIGALRM, before)


def _beside(seconds: float, call: Callable[[], object]) -> object:
    found: dict[str, object] = {}

    def work() -> None:
        try:
            found["answer"] = call()
        except BaseException as error:  # raised again by the caller
            found["error"] = error

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Overdue(f"no answer within {seconds:g} s")
    if "error" in found:
        raise found["error"]
    return found["answer"]
