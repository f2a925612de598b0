"""The training loop: restore, step, report, evaluate, checkpoint, for any object with step()."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_rlhf.core import activity, own_files
from hybrid_rlhf.core.distributed import device, is_main, max_over_ranks, sum_over_ranks, world_size
from hybrid_rlhf.core.errors import NotFinite, UserError, check
from hybrid_rlhf.core.memory import free_host_bytes
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.random_state import preserved
from hybrid_rlhf.core.startup import restore_gc
from hybrid_rlhf.engine.train.accumulate import rehearsal
from hybrid_rlhf.models.images import features_kept
from hybrid_rlhf.report.alarms import FREE
from hybrid_rlhf.report.pace import ANSWER, EVALUATE, EXPORT, REPORT, SAVE, Forecast
from hybrid_rlhf.run import checkpoint, process_count, tensor_file
from hybrid_rlhf.run.checkpoint import split
from hybrid_rlhf.run.checkpointing import Saver
from hybrid_rlhf.run.ending import Leaving, Stopped, leaves, on_record
from hybrid_rlhf.run.reporter import Reporter, tell
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.run.signals import interruptible
from hybrid_rlhf.run.train_config import TrainConfig

SAMPLED = 256  # rows whose lengths represent all
NOT_FINITE = "not_finite"  # in output_dir: the batch that led to a loss or gradient that is not finite
ENOUGH = 2.0  # seconds of a step; a longer one is rehearsed on half of its rows

__all__ = ["Batches", "Leaving", "Stopped", "TrainConfig", "Trainer", "fit", "on_record"]


class Trainer(Protocol):
    """A trainer that `fit` runs. progress_keys: the metrics that get a column on the terminal."""

    progress_keys: tuple[str, ...]

    def step(self, batch: object) -> Metrics: ...
    def evaluate(self, batches: Iterable) -> Metrics: ...
    def samples(self) -> list[dict]: ...
    def state(self) -> dict: ...
    def load_state(self, state: Mapping) -> None: ...


class Batches(Protocol):
    """Source of batches: endless by next(), one ordered pass by once()."""

    def __len__(self) -> int: ...
    def next(self) -> object: ...
    def once(self) -> Iterator: ...
    def state(self) -> dict: ...
    def load_state(self, state: Mapping) -> None: ...


def fit(trainer: Trainer, loader: Batches, held_out: Batches | None, config: TrainConfig, record: RunRecord,
        total_steps: int, answers: Callable[[], list[dict]] | None = None,
        guesses: Mapping[str, float] = MappingProxyType({}), leaving: Leaving | None = None) -> dict[str, float]:
    """Run up to step `total_steps` (or for config.max_seconds); returns the last step's metrics, the final evaluation's
    and time/per_step, seconds per step with evaluations and checkpoints.

    Resumes from record.resumes_from, if set. Writes metrics.jsonl, samples.jsonl, answers.jsonl (the rows of `answers`
    before the first step and after the last), checkpoints/ and a report under record.output_dir, and exports by
    `leaving`, after which the record is finished. guesses: seconds of the phases beside the steps (report/pace.py), for
    the estimate of the time. The first Ctrl-C, SIGTERM or SIGHUP finishes the step, saves a checkpoint, writes report
    and model and raises Stopped; the second stops at once. The record has the outcome in every case.
    """
    check(total_steps >= 1, f"the run has {total_steps} steps; it needs at least one")
    restore_gc()
    started, saver = time.perf_counter(), Saver(trainer, loader, held_out, record, config, total_steps)
    saver.num_updates_of = leaving.num_updates if leaving else saver.num_updates_of
    with on_record(record):
        saved = process_count.read_joined(record.resumes_from) if record.resumes_from else None
        first = saver.restore(saved)
        positions = saved and saved["reporter"]
        with (Reporter(record, trainer.progress_keys, total_steps, config, first, positions) as reporter,
              interruptible(lambda: _announce_stop(saver, reporter)) as interrupts):
            with leaves(leaving, saver, reporter, answers):
                _train(saver, reporter, interrupts, answers, guesses)
                saver.values |= {"time/per_step": (time.perf_counter() - started) / max(1, saver.step - first)}
            if _any(bool(interrupts)):
                raise Stopped(f"stopped after the last step, {saver.step}: the run is finished", is_finished=True)
    return saver.values


def _train(saver: Saver, reporter: Reporter, interrupts: list[int],
           answers: Callable[[], list[dict]] | None, guesses: Mapping[str, float]) -> None:
    """Take all remaining steps, with evaluations and checkpoints. Raises Stopped."""
    config, started, loader, total_steps = saver.config, time.perf_counter(), saver.loader, saver.total_steps
    reporter.answered(saver.step, answers if saver.step == 0 else None)
    is_cut = saver.owes_evaluation and saver.evaluate(saver.step, reporter, interrupts) is None
    if is_cut or (saver.step < total_steps and _any(bool(interrupts))):
        raise Stopped(f"stopped after step {saver.step} of {total_steps}")
    _forecast(saver, reporter, bool(answers), guesses)
    tell("begin", step=saver.step, total_steps=total_steps, trainer=saver.trainer)
    for step in range(saver.step + 1, total_steps + 1):
        tell("step_begin", step=step)
        saver.observe(_step(saver, step, reporter) | {"epoch": step / len(loader)})
        reporter.step(step, saver.values, saver.trainer.samples)
        asked = tell("step_end", step=step, values=saver.values)
        is_stopped, is_overdue = _requests(bool(interrupts), saver)
        is_last = step == total_steps or _any(_over(started, config.max_seconds) or asked.stop)
        is_evaluated = saver.held_out is not None and (is_last or asked.evaluate or _is_due(step, config.eval_steps))
        is_best = is_evaluated and not is_stopped and saver.evaluate(step, reporter, interrupts)
        is_stopped = is_stopped or is_best is None
        if is_evaluated and not is_stopped:  # what it was told may make a watcher ask
            told = tell("evaluate", step=step, values=saver.values)
            is_last, asked = is_last or _any(told.stop), asked._replace(save=asked.save or told.save)
        if is_stopped or is_last or is_best or is_overdue or asked.save or _is_due(step, config.save_steps):
            path = saver.save(step, reporter, owes_evaluation=is_evaluated and is_stopped)
            if is_best and path:
                saver.keep_best(path, reporter)
            if path:
                tell("save", step=step)
            if path and not (is_stopped or is_last):
                reporter.checkpointed(step)
        if is_stopped:
            raise Stopped(f"stopped after step {step} of {total_steps}")
        if is_last:
            break
    if tell("end", step=saver.step).best:
        _take_best(saver, reporter)


def _take_best(saver: Saver, reporter: Reporter) -> None:
    """Load the best checkpoint's weights, for the export."""
    paths = checkpoint.steps(saver.folder / checkpoint.BEST)
    if paths:
        saver.trainer.load_state(process_count.read_joined(paths[-1])["trainer"])
        reporter.announce(f"the model is that of {paths[-1].name}, the best by {saver.config.save_best}")


def _announce_stop(saver: Saver, reporter: Reporter) -> None:
    ending = "finishing this step, then saving a checkpoint, a report and the model"
    reporter.announce(f"{ending if saver.step < saver.total_steps else 'ending the run'}; once more stops at once")


def _forecast(saver: Saver, reporter: Reporter, has_answers: bool, guesses: Mapping[str, float]) -> None:
    """Estimate the run's time: from the rows' lengths and, if the trainer can be rehearsed, from part of a step on rows
    of typical length, which changes nothing. For other trainers the estimate comes within the first step."""
    loader, held_out, config, pace = saver.loader, saver.held_out, saver.config, reporter.progress.pace
    if not hasattr(loader, "typical"):
        return

    def ahead(step: int) -> dict[str, int]:
        def times(every: int) -> int:
            return (saver.total_steps - 1) // every - max(step - 1, pace.first) // every + 1 if every else 1

        return {EVALUATE: times(config.eval_steps) * bool(held_out), SAVE: times(config.save_steps),
                ANSWER: int(has_answers), REPORT: 1, EXPORT: 1}

    rows = loader.batch_size
    tokens = _num_tokens(loader.typical(SAMPLED)) / min(SAMPLED, len(loader.rows)) * rows
    batches = -(-len(held_out.rows) // (held_out.batch_size * held_out.world)) if held_out else 0
    batches = batches if config.max_eval_batches is None else min(batches, config.max_eval_batches)
    pace.forecast = Forecast(ahead, guesses, tokens, "from your rows' lengths" * bool(tokens),
                             getattr(saver.trainer, "warmup_steps", 0), batches,
                             (held_out.batch_size if held_out else 0) / rows)
    has_steps = pace.first < saver.total_steps
    if has_steps and getattr(saver.trainer, "can_rehearse", False) and world_size() == 1:
        pace.is_rehearsed, pace.rehearsed = True, guesses.get("update", 0.0) + _rehearse(saver.trainer, loader, tokens)
    pace.begin_steps()
    reporter.estimate()


def _rehearse(trainer: Trainer, loader, tokens: float) -> float:  # noqa: ANN001
    """Seconds of a step of so many tokens without its update, by passes over half of its rows, or over all if that is
    fast; a quarter of them comes first as warm-up."""
    seconds = float("inf")
    for is_first in (True, False):
        share = 4 if is_first else 2 if seconds > ENOUGH else 1
        batch = loader.typical(max(2, -(-loader.batch_size // share)))
        with rehearsal(), preserved():
            began = time.perf_counter()
            copy.copy(trainer).step(batch)
            if device().type == "cuda":  # kernels run asynchronously
                torch.cuda.synchronize(device())
            seconds = (time.perf_counter() - began) * tokens / _num_tokens(batch)
    return seconds


def _num_tokens(batch: object) -> int:
    """Tokens of a batch of training rows; 0 for prompts, and for a batch of another kind."""
    mask = getattr(getattr(batch, "sequences", batch), "attention_mask", None)
    return 0 if mask is None else int(mask.sum())


def _step(saver: Saver, step: int, reporter: Reporter) -> dict[str, float]:
    """Step number `step` on the next batch: its metrics over all processes, and its seconds."""
    began = time.perf_counter()
    activity.doing(f"step {step}")
    saver.mark()
    batch = saver.loader.next()
    reporter.progress.pace.tokens = _num_tokens(batch)
    try:
        # where each image has many forwards; other stages would hold its features for nothing
        with features_kept() if hasattr(saver.trainer, "roles") else nullcontext():
            metrics = saver.trainer.step(batch)
    except NotFinite as error:
        raise (_with_batch(error, saver, batch, saver.before_skips()) if is_main() else error) from error
    except UserError as error:
        if error.is_before_update:
            saver.save_undone(step - 1, reporter)
        raise
    if (free := free_host_bytes()) is not None and device().type == "cpu":
        metrics.add(FREE, free)
    rollout = last_rollout(saver.trainer)
    tokens = reporter.progress.pace.tokens or getattr(rollout, "num_tokens", 0)
    metrics = metrics.add("time/step", time.perf_counter() - began).over_ranks().compute()
    read = int(sum_over_ranks(torch.tensor(float(tokens), dtype=torch.double)))
    return metrics | {"num_tokens": saver.values.get("num_tokens", 0) + read}


def last_rollout(trainer: Trainer) -> Any:
    """The rollout of the last step; None for a trainer that samples none."""
    return getattr(getattr(trainer, "sampler", trainer), "last_rollout", None)


def _with_batch(error: NotFinite, saver: Saver, batch: object, saved: Path | None = None) -> NotFinite:
    """Save the batch that led to the error; returns the error with its path, and that of the last good checkpoint."""
    before = f"; the last checkpoint from before is {saved}" if saved else ""
    try:
        folder = keep_batch(saver.record.output_dir, batch=batch, rollout=last_rollout(saver.trainer))
    except OSError as refusal:
        return NotFinite(f"{error}; the batch could not be saved: {refusal.strerror}{before}")
    return NotFinite(f"{error}; the last batch is in {folder}{before}")


def keep_batch(output_dir: str | Path, **records: object) -> Path:
    """Write `records` (dataclasses of tensors and lists, such as a batch or a rollout) as tensors.safetensors and
    rest.json in a folder under output_dir; returns the folder. Existing files are replaced. Raises OSError."""
    folder = Path(output_dir) / NOT_FINITE
    tensors: dict[str, Tensor] = {}
    rest = split({name: _plain(record) for name, record in records.items() if record is not None}, "", tensors)
    with own_files.fresh_folder(Path(output_dir)) as beside:
        tensor_file.write(beside / "tensors.safetensors", tensors)
        (beside / "rest.json").write_text(json.dumps(rest, indent=1), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in beside.iterdir():
            path.replace(folder / path.name)
    return folder


def _plain(value: object) -> object:
    """Dataclasses as dicts, and values that a checkpoint cannot hold as their repr."""
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    is_kept = value is None or isinstance(value, (bool, int, float, str))
    return value if is_kept or (isinstance(value, Tensor) and tensor_file.is_storable(value)) else repr(value)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _over(started: float, limit: float | None) -> bool:
    return limit is not None and time.perf_counter() - started >= limit


def _requests(is_interrupted: bool, saver: Saver) -> tuple[bool, bool]:
    """Whether any process was asked to stop, and whether a checkpoint is due by the main process's clock (also true
    when stopping). One collective for both, as it runs at every step."""
    request = max_over_ranks(2 * is_interrupted + (is_main() and saver.is_overdue()))
    return request >= 2, request >= 1


def _any(flag: bool) -> bool:
    """Whether `flag` is set in any process: all must leave the loop after the same step."""
    return bool(max_over_ranks(int(flag)))
