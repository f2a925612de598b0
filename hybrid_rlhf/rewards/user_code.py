"""Calls of a user's code in this process: with a timeout, and with the state of the process restored after them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch

from hybrid_rlhf.core import random_state
from hybrid_rlhf.core.distributed import device

T = TypeVar("T")

_EVERY = 0.1  # seconds between two signals
_log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()  # (who, setting)


# -- the timeout -------------------------------------------------------------------------------------------------------


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
    answers: list[T] = []
    errors: list[BaseException] = []

    def expire(_number: int, frame: FrameType | None) -> None:
        if not (is_over or frame is None or frame is here):  # code of the call was interrupted
            raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    waiting = signal.setitimer(signal.ITIMER_REAL, seconds, _EVERY)
    try:
        answers.append(call())
    except BaseException as error:
        errors.append(error)
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_REAL, *waiting)
        signal.signal(signal.SIGALRM, before)
    if time.monotonic() - began > seconds and not any(isinstance(error, KeyboardInterrupt) for error in errors):
        raise Overdue(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return answers[0]


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


# -- torch's settings, the working directory, random generators --------------------------------------------------------


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


# setting: (how it is read, how it is set)
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device,
                               lambda d: torch.set_default_device(None if d.type == "cpu" else d)),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda pair: torch.use_deterministic_algorithms(pair[0], warn_only=pair[1])),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (_working_directory, lambda path: os.chdir(path or "."))}


def _reseed_device() -> None:
    place = device()
    torch.cuda.default_generators[place.index].manual_seed(int(torch.randint(2**62, (1,), device=place)))


# generator of random_state: how it goes on from a seed that it draws
_RESEED: dict[str, Callable[[], object]] = {
    "python": lambda: random.seed(random.getrandbits(64)),
    "numpy": lambda: np.random.seed(np.random.randint(2**32, dtype=np.uint32)),
    "torch": lambda: torch.default_generator.manual_seed(int(torch.randint(2**62, (1,)))),
    "device": _reseed_device}


@contextmanager
def unchanged(who: str) -> Iterator[None]:
    """Restore the _SETTINGS after the block, and warn once about each that it has changed.

    A random generator that the block drew from, or seeded, is restored and reseeded by its own next draw: training does
    not repeat the block's draws, and the next block draws other numbers.
    """
    settings, states = {name: read() for name, (read, _) in _SETTINGS.items()}, random_state.state()
    try:
        yield
    finally:
        changed = [name for name, (read, _) in _SETTINGS.items() if read() != settings[name]]
        for name in changed:
            _SETTINGS[name][1](settings[name])
        if new := [name for name in changed if (who, name) not in _warned]:
            _warned.update((who, name) for name in new)
            _log.warning("warning: %s changes %s for the whole process; what it was is restored after each call", who,
                         " and ".join(new))
        for name, state in random_state.state().items():
            if not _is_same(states[name], state):
                random_state.load_state({name: states[name]})
                _RESEED[name]()


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_is_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
