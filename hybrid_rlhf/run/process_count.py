"""Check whether a run can resume with another number of processes, and which settings may then change: those of how
rows, weights and memory are distributed. What all processes do together in a step stays the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.run import joined_state

_PER_PROCESS = ("train.per_device_train_batch_size", "train.gradient_accumulation_steps",
                "train.per_device_eval_batch_size", "ppo.ptx_batch_size", "model.gradient_checkpointing")
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
        saved = [each["trainer"] for each in joined_state.of_all(path)]
        joined_state.joined(saved, "trainer")
    except joined_state.Unlike as error:
        raise UserError(f"{what}: {error}; {instead}") from error
    except (LookupError, ValueError, TypeError, OSError):
        return  # damaged: reported, or an older one taken, where all of it is read
    is_cut = any(_of_engine(old, "zero_stage") != _of_engine(settings, "zero_stage") or _has_parts(each)
                 for each in saved)
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


def _of_engine(settings: Mapping, name: str) -> object:
    return (settings.get("engine") or {}).get(name)


def _has_parts(saved: Mapping) -> bool:
    """Whether weights anywhere in a trainer's state are sharded over processes."""
    if "partition" in saved:
        return saved["partition"]["stage"] > 0
    return any(_has_parts(each) for each in saved.values() if isinstance(each, Mapping))
