"""The state of every global random generator: Python's, numpy's, torch's on the CPU and on this process's device."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from hybrid_rlhf.core.distributed import device


def state() -> dict:
    """The state of all generators, for a checkpoint."""
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state()
    states = {"python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
             "numpy": {"kind": kind, "key": torch.from_numpy(np.asarray(key, dtype=np.int64)),
                       "position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)},
             "torch": torch.get_rng_state()}
    return states | ({"device": torch.cuda.get_rng_state(device())} if device().type == "cuda" else {})


def load_state(saved: Mapping) -> None:
    """Restore every generator that `saved` has a state of."""
    if python := saved.get("python"):
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if numpy := saved.get("numpy"):
        np.random.set_state((numpy["kind"], numpy["key"].numpy().astype(np.uint32), numpy["position"],
                             numpy["has_gauss"], numpy["cached"]))
    if "torch" in saved:
        torch.set_rng_state(saved["torch"])
    if device().type == "cuda" and "device" in saved:
        torch.cuda.set_rng_state(saved["device"], device())


@contextmanager
def preserved() -> Iterator[None]:
    """After the block every generator is as it was before."""
    before = state()
    try:
        yield
    finally:
        load_state(before)


@contextmanager
def undisturbed() -> Iterator[None]:
    """The block (or, as a decorator, the function) leaves Python's global generator as it was: rich draws from it, at
    different times in a terminal and in a file, before and after a run is resumed."""
    before = random.getstate()
    try:
        yield
    finally:
        random.setstate(before)
