"""Resume a run with another number of processes: whether that is possible, which settings may then change (how rows,
weights and memory are distributed; what all processes do together in a step stays the same), and the state to resume
from, joined from the states that the processes saved.

Most of a state is the same in all processes. Trained weights may be sharded, as their "partition" describes, and are
resharded by the engine that loads them; memory limits and global generators are each process's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import rank, world_size
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.engine.train.repartition import PROCESSES
from hybrid_rlhf.run import checkpoint

_PER_PROCESS = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps",
                "train.per_device_eval_batch_size", "ppo.ptx_batch_size", "model.gradient_checkpointing")
_PARTS, _LIMITS = "partition", "oom_limits"
_LAYOUT = ("zero_stage", "offload", "micro_batch_tokens", "tp")  # of engine and of each role


def may_change(name: str) -> bool:
    """Whether the setting of this dotted name may change with the number of processes."""
    group, _, option = name.partition(".")
    return name in _PER_PROCESS or (group in ("engine", "roles") and option.rpartition(".")[2] in _LAYOUT)


def check_others(path: Path, facts: Mapping, settings: Mapping) -> None:
    """UserError, with what would fit, where the run that made the checkpoint in `path` cannot resume with this other
    number of processes and these settings. facts: the checkpoint's about its run (resume.made_by)."""
    before, count, old = facts["world_size"], world_size(), facts["settings"]
    what = f"the checkpoint {path} was made by {before} process{'es' * (before > 1)} and this run has {count}"
    instead = f"start {before}, or give --resume never to start again"
    _check_rows(what, old, settings, before)
    _check_texts(what, old, settings, before)
    try:
        saved = [each["trainer"] for each in of_all(path)]
        joined(saved, "trainer")
    except Unlike as error:
        raise UserError(f"{what}: {error}; {instead}") from error
    except (LookupError, ValueError, TypeError, OSError):
        return  # damaged: reported, or an older one taken, where all of it is read
    stages = [(each.get("engine") or {}).get("zero_stage") for each in (old, settings)]
    is_cut = stages[0] != stages[1] or any(map(_has_parts, saved))
    check(not is_cut or _of_train(old, "optim") != "adamw_8bit",
          f"{what}: train.optim adamw_8bit scales blocks of what each process holds; {instead}")


def note(facts: Mapping, settings: Mapping) -> str | None:
    """A note about resuming with another number of processes; None with the same number."""
    before, count = facts["world_size"], world_size()
    if before == count:
        return None
    sizes = [_of_train(each, "per_device_eval_batch_size", 0) * n for each, n in
             ((facts["settings"], before), (settings, count))]
    more = f"; held-out batches have {sizes[1]} rows, not {sizes[0]}: of a stage that samples, other responses are " \
           "evaluated" if sizes[0] != sizes[1] else ""
    return f"note: {before} process{'es' * (before > 1)} made the checkpoint and {count} go{'es' * (count == 1)} on: " \
           "the same rows and weights up to rounding; dropout, where there is any, draws other masks" + more


def _check_rows(what: str, old: Mapping, new: Mapping, before: int) -> None:
    """A step must have as many rows over all processes as before."""
    count, rows = world_size(), _rows(old)
    check(rows is not None and _rows(new) is not None,
          f"{what}, and its settings do not say how many rows a process takes; start {before}, or give --resume never "
          "to start again")
    total, now, steps = rows * before, _rows(new) * count, _of_train(new, "gradient_accumulation_steps", 1)
    if now == total:
        return
    accumulated = f"--train.per_device_train_batch_size {total // (count * steps)}"
    at_once = f"--train.per_device_train_batch_size {total // count} --train.gradient_accumulation_steps 1"
    fits = f"give {accumulated}" if total % (count * steps) == 0 else f"give {at_once}" if total % count == 0 else (
        f"start {before}, or another number that divides {total}")
    raise UserError(f"{what}: a step took {total} rows from all processes and would take {now}; {fits}")


def _check_texts(what: str, old: Mapping, new: Mapping, before: int) -> None:
    """A step must have as many texts of PTX, and demonstrations of distillation, as before."""
    count = world_size()
    for option, of in (("ppo.ptx_batch_size", _texts), ("distill.num_minibatches", _demonstrations)):
        total, now = of(old) * before, of(new) * count
        fits = f"give --{option} {total // count}" if option.startswith("ppo") and total and total % count == 0 else (
            f"start {before}, or give --resume never to start again")
        check(total == now, f"{what}: by {option} an optimizer step took {total} texts from all processes and would "
                            f"take {now}; {fits}")


def _rows(settings: Mapping) -> int | None:
    """Rows of a step on one process."""
    size = _of_train(settings, "per_device_train_batch_size")
    return None if size is None else size * _of_train(settings, "gradient_accumulation_steps", 1)


def _texts(settings: Mapping) -> int:
    """Texts of PTX on one process, where set; else they follow from the sequences, which are checked already."""
    return (settings.get("ppo") or {}).get("ptx_batch_size") or 0


def _demonstrations(settings: Mapping) -> int:
    distill = settings.get("distill") or {}
    if "num_minibatches" not in distill or distill.get("lmbda", 1) == 1:
        return 0
    return -(-(_rows(settings) or 0) * distill["sampling"]["num_samples"] // distill["num_minibatches"])


def _of_train(settings: Mapping, name: str, default: object = None):  # noqa: ANN202
    return (settings.get("train") or {}).get(name, default)


def _has_parts(saved: Mapping) -> bool:
    """Whether weights anywhere in a trainer's state are sharded over processes."""
    if "partition" in saved:
        return saved["partition"]["stage"] > 0
    return any(_has_parts(each) for each in saved.values() if isinstance(each, Mapping))


# -- one state of several ----------------------------------------------------------------------------------------------


class Unlike(ValueError):
    """Processes saved a state from which another number of processes cannot resume; `check_others` makes a UserError of
    it before a run begins."""


def read_joined(path: Path) -> Mapping:
    """The state that this process resumes with, of a complete checkpoint. Raises Unlike where the number of processes
    is another one, and the saved states do not allow that."""
    saved = of_all(path)
    if len(saved) == world_size():
        return checkpoint.read(path)
    return dict(saved[0]) | {"trainer": joined([each["trainer"] for each in saved], "trainer"),
                             "random": _generators([each["random"] for each in saved])}


def of_all(path: Path) -> list[checkpoint.Stored]:
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
