"""What someone else's code may leave changed in this process, and training would meet far away from there."""

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
_told: set[tuple[str, str]] = set()  # (who, what) of the warnings that were given


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _go_to(path: str | None) -> None:
    if path:
        os.chdir(path)


# what: (how it is read, how it is set)
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
    "cuDNN's flags": (lambda: (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
                      lambda pair: _set_cudnn(*pair)),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the working directory": (_folder, _go_to)}


def _set_cudnn(is_deterministic: bool, benchmark: bool) -> None:
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = is_deterministic, benchmark


@contextmanager
def unchanged(who: str) -> Iterator[None]:
    """However the block ends, the _SETTINGS are what they were, with a warning, once, for each that was not.

    So are the random generators, but that one which the block has drawn from, or seeded, goes on from a seed that it
    draws itself: training does not repeat its draws, and the block's next draws are others.
    """
    settings, generators = _settings(), _states()
    try:
        yield
    finally:  # nothing here takes the place of what the block raises
        try:
            _restore(who, settings)
        finally:
            try:
                _separate(generators)
            except Exception as error:
                _log.warning("warning: the random generators are not as they were before %s: %s", who, error)


def _settings() -> dict[str, Any]:
    """What can be read: torch refuses to tell a precision in the older way once it was set in the newer one."""
    found = {}
    for what, (read, _) in _SETTINGS.items():
        with suppress(Exception):
            found[what] = read()
    return found


def _restore(who: str, before: dict[str, Any]) -> None:
    after, restored = _settings(), []
    for what in (name for name, value in after.items() if name in before and value != before[name]):
        try:
            _SETTINGS[what][1](before[what])
        except Exception as error:
            _log.warning("warning: %s changes %s for the whole process, and it cannot be restored: %s", who, what,
                         error)
        else:
            restored.append(what)
    new = [what for what in restored if (who, what) not in _told]
    _told.update((who, what) for what in new)
    if new:
        _log.warning("warning: %s changes %s for the whole process; what it was is restored after each call", who,
                     " and ".join(new))


def _separate(before: dict[str, Any]) -> None:
    """The generators as they were, each that has moved since on a seed that it draws."""
    for name in (name for name, found in _states().items() if not _is_same(before[name], found)):
        _, write, reseed = _GENERATORS[name]
        write(before[name])
        reseed()


def _states() -> dict[str, Any]:
    """As each generator tells its own: an environment's every call is compared, so nothing is converted."""
    return {name: read() for name, (read, _, _) in _GENERATORS.items() if name != "device" or device().type == "cuda"}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return all(map(np.array_equal, a, b)) if a[0] == "MT19937" else a == b  # numpy's holds an array


def _reseed_device() -> None:
    place = device()
    torch.cuda.default_generators[place.index].manual_seed(int(torch.randint(2**62, (1,), device=place)))


# which: (how its state is read, how it is set, how it goes on from a seed that it draws)
_GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[], object]]] = {
    "python": (random.getstate, random.setstate, lambda: random.seed(random.getrandbits(64))),
    "numpy": (np.random.get_state, np.random.set_state,
              lambda: np.random.seed(np.random.randint(2**32, dtype=np.uint32))),
    "torch": (torch.get_rng_state, torch.set_rng_state,
              lambda: torch.default_generator.manual_seed(int(torch.randint(2**62, (1,))))),
    "device": (lambda: torch.cuda.get_rng_state(device()), lambda state: torch.cuda.set_rng_state(state, device()),
               _reseed_device)}
