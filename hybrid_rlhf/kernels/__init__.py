"""The kernels: one table of operations per device. kernels/reference.py defines each operation."""

from __future__ import annotations

import logging
from functools import cache

import torch

from hybrid_rlhf.kernels import reference
from hybrid_rlhf.kernels.ops import KernelsUnavailableError, Ops

_log = logging.getLogger(__name__)

REFERENCE = Ops("reference", reference.decode_attention, reference.sample)


@cache
def ops_for(device_type: str) -> Ops:
    """The fastest kernels that this machine has for a device ("cpu", "cuda"). Where there are none, the torch
    reference, with the reason in its name and in a warning: nothing falls back silently.
    """
    try:
        return _load(device_type)
    except KernelsUnavailableError as error:
        _log.warning("%s kernels: the torch reference is used (%s)", device_type, error)
        return REFERENCE._replace(name=f"reference ({error})")


def _load(device_type: str) -> Ops:
    if device_type == "cpu":
        try:
            from hybrid_rlhf.kernels import cpu
        except ImportError as error:
            raise KernelsUnavailableError(f"no C++ kernels in this installation: {error}") from error
        return cpu.load()
    if device_type == "cuda":
        from hybrid_rlhf.kernels import cuda

        return cuda.load()
    raise KernelsUnavailableError(f"no kernels for {torch.device(device_type).type} in this installation")
