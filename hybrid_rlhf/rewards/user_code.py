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
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch

from hybrid_rlhf.core.distributed import device
from hybrid_rlhf.core.function_worker import one_line

T = TypeVar("T")

_EVERY, _PATIENCE = 0.1, 1.0  # seconds between two signals, and until they come without pause
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


# -- torch's settings, the working directory, random generators --------------------------------------------------------


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _set_cudnn(flags: tuple[bool, bool]) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = flags


# setting: (how it is read, how it is set)
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (torch.get_default_device,
                               lambda d: torch.set_default_device(None if d.type == "cpu" else d)),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda pair: torch.use_deterministic_algorithms(pair[0], warn_only=pair[1])),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cuDNN's flags": (lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark), _set_cudnn),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (_working_directory, lambda path: os.chdir(path or "."))}


def _reseed_device() -> None:
    place = device()
    torch.cuda.default_generators[place.index].manual_seed(int(torch.randint(2**62, (1,), device=place)))


# generator: (how its state is read, how it is set, how it goes on from a seed that it draws)
_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[], object]]] = {
    "python": (random.getstate, random.setstate, lambda: random.seed(random.getrandbits(64))),
    "numpy": (np.random.get_state, np.random.set_state,
              lambda: np.random.seed(np.random.randint(2**32, dtype=np.uint32))),
    "torch": (torch.get_rng_state, torch.set_rng_state,
              lambda: torch.default_generator.manual_seed(int(torch.randint(2**62, (1,))))),
    "device": (lambda: torch.cuda.get_rng_state(device()), lambda state: torch.cuda.set_rng_state(state, device()),
               _reseed_device)}


@contextmanager
def unchanged(who: str) -> Iterator[None]:
    """Restore the _SETTINGS after the block, and warn once about each that it has changed.

    A random generator that the block drew from, or seeded, is restored and reseeded by its own next draw: training does
    not repeat the block's draws, and the next block draws other numbers.
    """
    settings, states = _settings(), _states()
    try:
        yield
    finally:
        try:
            _restore(who, settings)
        finally:
            for name, state in _states().items():
                if not _is_same(states[name], state):
                    _, write, reseed = _GENERATORS[name]
                    write(states[name])
                    reseed()


def _settings() -> dict[str, Any]:
    """The readable settings: torch refuses to read a precision by its old API once it was set by the new one."""
    values = {}
    for name, (read, _) in _SETTINGS.items():
        with suppress(Exception):
            values[name] = read()
    return values


def _restore(who: str, before: dict[str, Any]) -> None:
    restored = []
    for name in [name for name, value in _settings().items() if name in before and value != before[name]]:
        try:
            _SETTINGS[name][1](before[name])
            restored.append(name)
        except Exception as error:  # it must not replace the result of the block
            _log.warning("warning: %s changes %s for the whole process, and it cannot be restored: %s", who, name,
                         error)
    new = [name for name in restored if (who, name) not in _warned]
    _warned.update((who, name) for name in new)
    if new:
        _log.warning("warning: %s changes %s for the whole process; what it was is restored after each call", who,
                     " and ".join(new))


def _states() -> dict[str, Any]:
    return {name: read() for name, (read, _, _) in _GENERATORS.items() if name != "device" or device().type == "cuda"}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(np.array_equal, a, b)) if a[0] == "MT19937" else a == b  # numpy's holds an array
