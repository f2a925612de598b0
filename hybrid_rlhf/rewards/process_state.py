"""Restore process state after a user's code: torch's settings, the working directory, random generators."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from hybrid_rlhf.core.distributed import device

_log = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()  # (who, setting)


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
