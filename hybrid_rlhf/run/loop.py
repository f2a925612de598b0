"""The one loop: restore, step, report, evaluate, checkpoint, for any object with step()."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.distributed import device, is_main, max_over_ranks, world_size
from hybrid_rlhf.core.errors import NotFinite, UserError, check
from hybrid_rlhf.core.failure import lost_process, on_failure
from hybrid_rlhf.core.host_memory import free_host_bytes
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.random_state import preserved
from hybrid_rlhf.core.startup import restore_gc
from hybrid_rlhf.engine.train.accumulate import rehearsal
from hybrid_rlhf.report.alarms import FREE
from hybrid_rlhf.report.pace import ANSWER, EVALUATE, EXPORT, REPORT, SAVE, Forecast
from hybrid_rlhf.run import bad_batch, joined_state
from hybrid_rlhf.run.checkpointing import Saver
from hybrid_rlhf.run.reporter import Reporter
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.run.signals import interruptible
from hybrid_rlhf.run.train_config import TrainConfig

SAMPLED = 256  # rows whose lengths stand for all
ENOUGH = 2.0  # seconds of a step from which half of it is rehearsed and not all

__all__ = ["Batches", "Stopped", "TrainConfig", "Trainer", "fit", "on_record"]


class Trainer(Protocol):
    """What `fit` drives. progress_keys: the metrics worth a column on the terminal."""

    progress_keys: tuple[str, ...]

    def step(self, batch: object) -> Metrics: ...
    def evaluate(self, batches: Iterable) -> Metrics: ...
    def samples(self) -> list[dict]: ...
    def state(self) -> dict: ...
    def load_state(self, state: Mapping) -> None: ...


class Batches(Protocol):
    """Where batches come from: endless by iteration, one ordered pass by once()."""

    def __len__(self) -> int: ...
    def next(self) -> object: ...
    def once(self) -> Iterator: ...
    def state(self) -> dict: ...
    def load_state(self, state: Mapping) -> None: ...


class Stopped(Exception):  # noqa: N818 - not a fault: the user asked for it
    """The user stopped the run and a checkpoint was saved; the message says where. Entry points exit with 130."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it, in a notebook too: the line alone."""
        return [str(self)]


def fit(trainer: Trainer, loader: Batches, held_out: Batches | None, config: TrainConfig, record: RunRecord,
        total_steps: int, answers: Callable[[], list[dict]] | None = None,
        guesses: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
    """Run up to step `total_steps` (or for config.max_seconds); returns the last step's metrics, the final evaluation's
    and time/per_step, seconds per step with evaluations and checkpoints.

    Goes on from record.resumes_from where there is one. Writes metrics.jsonl, samples.jsonl, answers.jsonl (what
    `answers` gives before the first step and after the last) and checkpoints/ under record.output_dir. guesses: seconds
    of what is no step (report/pace.py), for the estimate of the time. The first Ctrl-C, SIGTERM or SIGHUP finishes the
    step, saves a checkpoint and raises Stopped; the second stops at once. However the loop ends but well, the
    record says so.
    """
    check(total_steps >= 1, f"the run has {total_steps} steps; it needs at least one")
    restore_gc()
    started, saver = time.perf_counter(), Saver(trainer, loader, held_out, record, config, total_steps)
    with on_record(record):
        saved = joined_state.read(record.resumes_from) if record.resumes_from else None
        first = step = saver.restore(saved)
        positions = saved and saved["reporter"]
        with (Reporter(record, trainer.progress_keys, total_steps, config, first, positions) as reporter,
              interruptible(reporter.say) as interrupts):
            reporter.answered(0, answers if step == 0 else None)
            if saver.owes_evaluation:
                saver.evaluate(step, reporter)
            _forecast(saver, reporter, bool(answers), guesses)
            for step in range(first + 1, total_steps + 1):
                saver.observe(_step(saver, step, reporter) | {"epoch": step / len(loader)})
                reporter.step(step, saver.values, trainer.samples)
                is_stopped, is_overdue = _news(bool(interrupts), saver)
                is_last = step == total_steps or _any(_over(started, config.max_seconds))
                is_evaluated = held_out is not None and (is_last or _is_due(step, config.eval_steps))
                is_best = is_evaluated and not is_stopped and saver.evaluate(step, reporter)
                if is_stopped or is_last or is_best or is_overdue or _is_due(step, config.save_steps):
                    path = saver.save(step, reporter, owes_evaluation=is_evaluated and is_stopped)
                    if is_best and path:
                        saver.keep_best(path, reporter)
                if is_stopped or (is_last and _any(bool(interrupts))):  # the second: during evaluation or saving
                    raise Stopped(f"stopped after step {step} of {total_steps}; {_where(path, record)}")
                if is_last:
                    break
            reporter.answered(step, answers)
            reporter.conclude()
    return saver.values | {"time/per_step": (time.perf_counter() - started) / max(1, step - first)}


def _forecast(saver: Saver, reporter: Reporter, has_answers: bool, guesses: Mapping[str, float]) -> None:
    """Say how long the run takes: by the rows that are to come and, where the trainer can be rehearsed, by a part of a
    step over rows of typical length that changes nothing. Other trainers tell within the first step."""
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
    reporter.estimate()


def _rehearse(trainer: Trainer, loader, tokens: float) -> float:  # noqa: ANN001
    """Seconds of a step of so many tokens without its update, by passes over half of its rows, or over all where that
    is soon over; a quarter of them goes before, for the first passes of a process take longer."""
    seconds = float("inf")
    for is_first in (True, False):
        share = 4 if is_first else 2 if seconds > ENOUGH else 1
        batch = loader.typical(max(2, -(-loader.batch_size // share)))
        with rehearsal(), preserved():
            began = time.perf_counter()
            copy.copy(trainer).step(batch)
            if device().type == "cuda":  # which is told what to do, and has yet to do it
                torch.cuda.synchronize(device())
            seconds = (time.perf_counter() - began) * tokens / _num_tokens(batch)
    return seconds


def _num_tokens(batch: object) -> int:
    """Tokens of a batch of rows that are trained on; 0 where it has none yet, or is of another kind."""
    mask = getattr(getattr(batch, "sequences", batch), "attention_mask", None)
    return 0 if mask is None else int(mask.sum())


def _where(path: Path | None, record: RunRecord) -> str:
    """How the run goes on; the path last, for people to copy."""
    never = " without --resume never" if record.config.get("resume") == "never" else ""
    return f"the same command{never} goes on there; the checkpoint is {path}" if path else (
        "no checkpoint of it could be saved: the same command goes on from an earlier one, or begins again")


def _step(saver: Saver, step: int, reporter: Reporter) -> dict[str, float]:
    """Step number `step` on the next batch: its metrics over all processes, and its seconds."""
    began = time.perf_counter()
    activity.doing(f"step {step}")
    saver.mark()
    batch = saver.loader.next()
    reporter.progress.pace.tokens = _num_tokens(batch)
    try:
        metrics = saver.trainer.step(batch)
    except NotFinite as error:
        raise (_kept(error, saver, batch, saver.before_skips()) if is_main() else error) from error
    except UserError as error:
        if error.is_before_update:
            saver.save_undone(step - 1, reporter)
        raise
    if (free := free_host_bytes()) is not None and device().type == "cpu":
        metrics.add(FREE, free)
    return metrics.add("time/step", time.perf_counter() - began).over_ranks().compute()


def _kept(error: NotFinite, saver: Saver, batch: object, saved: Path | None = None) -> NotFinite:
    """The error, with where to find the batch that led to it, and the last checkpoint from before."""
    before = f"; the last checkpoint from before is {saved}" if saved else ""
    try:
        rollout = getattr(getattr(saver.trainer, "sampler", saver.trainer), "last_rollout", None)
        folder = bad_batch.keep(saver.record.output_dir, batch=batch, rollout=rollout)
    except OSError as refusal:
        return NotFinite(f"{error}; the batch could not be saved: {refusal.strerror}{before}")
    return NotFinite(f"{error}; the last batch is in {folder}{before}")


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _over(started: float, limit: float | None) -> bool:
    return limit is not None and time.perf_counter() - started >= limit


def _news(is_interrupted: bool, saver: Saver) -> tuple[bool, bool]:
    """Whether any process was asked to stop, and whether the main process's clock asks for a checkpoint, at least where
    nobody stops. One question for both: it is asked at every step."""
    news = max_over_ranks(2 * is_interrupted + (is_main() and saver.is_overdue()))
    return news >= 2, news >= 1


def _any(mine: bool) -> bool:
    """Whether any process says so: all must leave the loop after the same step."""
    return bool(max_over_ranks(int(mine)))


@contextmanager
def on_record(record: RunRecord) -> Iterator[None]:
    """Whatever ends the block other than its end, another process's failure too, is written to run.json."""
    try:
        with on_failure(lambda message: _close(record, "failed", message)):
            yield
    except (Stopped, KeyboardInterrupt):
        _close(record, "stopped")
        raise
    except (Exception, SystemExit) as error:  # a reward function may call sys.exit()
        _close(record, "failed", lost_process(error) or f"{type(error).__name__}: {error}")
        raise


def _close(record: RunRecord, status: str, error: str | None = None) -> None:
    """On the record, if the disk takes it: what ended the run is what people are to be told."""
    try:
        record.close(status, error)
    except OSError as refusal:
        print(f"warning: run.json still says that the run goes on: {refusal.strerror}", file=sys.stderr)
