"""Find the checkpoint that a run resumes from, and check that its settings are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import world_size
from hybrid_rlhf.run import checkpoint, process_count

FOLDER = "checkpoints"
NO_MATTER = ("resume", "output_dir", "report_to", "run_name")  # settings without influence on the result
# settings that may change when a run is resumed: they affect what is written and when it stops, not the training
HARMLESS = (*NO_MATTER, "data.cache_dir", "train.logging_steps", "train.save_steps", "train.save_minutes",
            "train.save_total_limit", "train.save_best", "train.max_failed_saves", "train.eval_steps",
            "train.max_eval_batches", "train.max_seconds")
_LENGTHS = ("train.max_steps", "train.num_train_epochs")


def changes(old: Mapping, new: Mapping, harmless: tuple[str, ...] = NO_MATTER, prefix: str = "") -> list[str]:
    """Sorted dotted names of settings that differ, without the harmless ones. A setting that is in one of both only, of
    another release, does not count."""
    names: set[str] = set()
    for key in old.keys() & new.keys():
        a, b, name = old[key], new[key], f"{prefix}{key}"
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            names |= set(changes(a, b, harmless, f"{name}."))
        elif a != b and name not in harmless:
            names.add(name)
    return sorted(names)


def later_end(old: Mapping, new: Mapping) -> tuple[str, ...]:
    """The settings of a run's length if the learning rate does not depend on it, so that a run may be extended; else
    ()."""
    def is_flat(train: Mapping) -> bool:
        kind, warmup = train.get("lr_scheduler_type"), train.get("warmup_ratio")
        return kind == "constant" or (kind == "constant_with_warmup" and warmup == 0)

    return _LENGTHS if is_flat(old.get("train", {})) and is_flat(new.get("train", {})) else ()


def find(output_dir: Path, wanted: str, warn: Callable[[str], None] = lambda _text: None, *,
         is_thorough: bool = False) -> Path | None:
    """The checkpoint that the setting resume means: "auto" the newest complete one or None, else the one of that path.

    is_thorough: every byte is checked, else sizes only. warn: gets a line about each damaged one. Raises UserError for
    a path that is not a complete checkpoint of this very run.
    """
    if wanted == "never":
        return None
    if wanted == "auto":
        path = checkpoint.latest(output_dir / FOLDER, warn, is_thorough=is_thorough)
        return path if path is not None and made_by(path) is not None else None
    path, home = Path(wanted).absolute(), (output_dir / FOLDER).resolve()
    check(path.exists(), f"resume is {wanted!r}; choose auto, never or the path of a checkpoint")
    check(path.resolve().parent in (home, home / checkpoint.BEST) and checkpoint.is_name(path.name),
          f"resume {wanted}: not a checkpoint of this run, which keeps them in {output_dir / FOLDER}; to go on "
          "elsewhere, copy the run's folder")
    wrong = checkpoint.damage(path, is_thorough=is_thorough)
    check(wrong is None, f"resume {wanted}: the checkpoint is damaged ({wrong}); take another, or auto")
    return path


def made_by(path: Path) -> dict | None:
    """The facts in a complete checkpoint about the run that made it (Saver._run), or None where it has none."""
    try:
        facts = checkpoint.load_all(checkpoint.read(path, of=0)["run"])
        is_ours = isinstance(facts["settings"], dict) and isinstance(facts["world_size"], int)
    except (LookupError, ValueError, TypeError):
        return None
    return facts if is_ours else None


def check_fits(path: Path, settings: Mapping) -> dict:
    """The checkpoint's facts about its run: settings, world_size, step, total_steps.

    Raises UserError where settings other than HARMLESS ones and a later end have changed, or where another number of
    processes cannot resume from it.
    """
    facts = made_by(path)
    check(facts is not None, f"{path} is not a checkpoint of a run; take another, or auto")
    old, is_other = facts["settings"], facts["world_size"] != world_size()
    changed = [name for name in changes(old, settings, (*HARMLESS, *later_end(old, settings)))
               if not (is_other and process_count.may_change(name))]
    check(not changed, f"output_dir {path.parents[1]} holds an unfinished run with other settings "
                       f"({', '.join(changed[:5])}); give them as they were, choose another output_dir, or give "
                       "--resume never to start again")
    if is_other:
        process_count.check_others(path, facts, settings)
    return facts


def instead(output_dir: Path, stage: str, changed: list[str]) -> str:
    """Advice in place of running a finished run again: if only its length has changed, to train its model further."""
    if not set(changed) <= {*_LENGTHS, "train.max_seconds"}:
        return "choose another output_dir"
    model = output_dir / "model" if stage == "reward" else output_dir
    return f"to train its model further give --model {model} and another --output_dir"


def is_shared_otherwise(output_dir: Path, changed: list[str]) -> bool:
    """Whether a finished run's settings differ only because of another number of processes."""
    path = find(output_dir, "auto")
    facts = made_by(path) if path else None
    return facts is not None and facts["world_size"] != world_size() and all(map(process_count.may_change, changed))


def can_go_on(output_dir: Path, changed: list[str], old: Mapping, new: Mapping) -> bool:
    """Whether a finished run can be extended: only its end has changed, and there is a checkpoint."""
    path = find(output_dir, "auto")
    if path is None:
        return False
    left = set(changed) - {*later_end(old, new), "train.max_seconds"}
    if left and not is_shared_otherwise(output_dir, sorted(left)):
        return False
    facts = check_fits(path, new)
    return facts["step"] < facts["total_steps"] or bool(set(changed) & set(_LENGTHS))
