"""Join the states that several processes saved, so that another number of processes can resume from them.

Most of a state is the same in all processes. Trained weights may be sharded, as their "partition" describes, and are
resharded by the engine that loads them; memory limits and global generators are each process's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybrid_rlhf.core.distributed import rank, world_size
from hybrid_rlhf.engine.train.repartition import PROCESSES
from hybrid_rlhf.run import checkpoint
from hybrid_rlhf.run.state_tree import Stored

_PARTS, _LIMITS = "partition", "oom_limits"


class Unlike(ValueError):
    """Processes saved a state from which another number of processes cannot resume. process_count.py checks for it
    before a run begins, and raises a UserError."""


def read(path: Path) -> Mapping:
    """The state that this process resumes with, of a complete checkpoint. Raises Unlike where the number of processes
    is another one, and the saved states do not allow that."""
    saved = of_all(path)
    if len(saved) == world_size():
        return checkpoint.read(path)
    return dict(saved[0]) | {"trainer": joined([each["trainer"] for each in saved], "trainer"),
                             "random": _generators([each["random"] for each in saved])}


def of_all(path: Path) -> list[Stored]:
    """The states of all processes in a complete checkpoint, with memory-mapped tensors."""
    return [checkpoint.read(path, of=r, is_mapped=True) for r in range(checkpoint.num_processes(path))]


def joined(saved: list, name: str) -> object:
    """What all processes saved under `name`, as one: {"processes": [state of each]} for sharded weights, the smallest
    of limits, else the value that all have. Raises Unlike where they differ."""
    first = saved[0]
    if isinstance(first, Mapping):
        if _PARTS in first:
            return {PROCESSES: saved}
        if name.endswith(_LIMITS):
            return _smallest(saved)
        if "optimizer" in first:
            raise Unlike(f"the checkpoint's {name} was saved by an earlier release, which did not write down how its "
                         "processes share it")
        if all(isinstance(each, Mapping) and each.keys() == first.keys() for each in saved):
            return {key: joined([each[key] for each in saved], f"{name}.{key}") for key in first}
    elif isinstance(first, list):
        if all(isinstance(each, list) and len(each) == len(first) for each in saved):
            return [joined(list(each), f"{name}[{i}]") for i, each in enumerate(zip(*saved, strict=True))]
    elif all(_is_same(first, each) for each in saved[1:]):
        return first.clone() if isinstance(first, Tensor) else first
    raise Unlike(f"its {len(saved)} processes have each a {name} of their own in the checkpoint")


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b or (a != a and b != b)  # NaN


def _smallest(saved: list[Mapping]) -> dict:
    """The smallest of the processes' limits, by name, or by role and name; a process that never ran out of memory has
    none."""
    names = dict.fromkeys(name for each in saved for name in each)
    limits = {name: [each[name] for each in saved if name in each] for name in names}
    return {name: _smallest(of) if isinstance(of[0], Mapping) else min(of) for name, of in limits.items()}


def _generators(saved: list[Mapping]) -> Mapping:
    """The random state of this process: its own where it saved one. A new process keeps torch's as its stage has seeded
    it, for its own dropout, and takes the others, which all processes start with alike, from the first."""
    if rank() < len(saved):
        return saved[rank()]
    return {name: state for name, state in saved[0].items() if name in ("python", "numpy")}
