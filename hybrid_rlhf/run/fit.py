"""The one loop: step, report, evaluate, checkpoint, for any object with step()."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybrid_rlhf.algorithms.schedule import KINDS
from hybrid_rlhf.config import check, nearest
from hybrid_rlhf.distributed import max_over_ranks
from hybrid_rlhf.engine.optimizers import OPTIMIZERS
from hybrid_rlhf.failure import on_failure
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.run import checkpoint
from hybrid_rlhf.run.report import Reporter
from hybrid_rlhf.run.runfile import RunRecord


@dataclass(frozen=True)
class TrainConfig:
    """The schedule of a stage.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: AdamW's decay of matrices; norms and biases are never decayed.
        adam_beta1: Decay of the gradient's mean.
        adam_beta2: Decay of the gradient's square.
        adam_epsilon: Added to the root of the square.
        optim: adamw (fused), adamw_unfused, adamw_8bit (moments in 8 bits, bitsandbytes) or sgd.
        max_grad_norm: Gradients are scaled down to this norm.
        lr_scheduler_type: cosine, linear, constant or constant_with_warmup.
        warmup_ratio: Share of the optimizer steps during which the rate rises linearly.
        num_train_epochs: Passes over the data.
        max_steps: Number of steps; if positive it wins over num_train_epochs.
        max_seconds: Stop after the step that reaches this time; null has no limit.
        per_device_train_batch_size: Rows (prompts for PPO) per process and accumulation step.
        gradient_accumulation_steps: Multiplies the rows of an optimizer step.
        per_device_eval_batch_size: Rows per process in evaluation.
        logging_steps: Steps between two lines on the terminal, in samples.jsonl and in trackers; metrics.jsonl has
            every step.
        eval_steps: Steps between two evaluations; 0 evaluates at the end only.
        max_eval_batches: At most so many batches per evaluation; null takes all.
        save_steps: Steps between two checkpoints; 0 saves at the end only.
        save_total_limit: Checkpoints that are kept.
    """

    learning_rate: float = 5e-5
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    optim: str = "adamw"
    max_grad_norm: float = 1.0
    lr_scheduler_type: str = "cosine"
    warmup_ratio: float = 0.03
    num_train_epochs: float = 1.0
    max_steps: int = -1
    max_seconds: float | None = None
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    per_device_eval_batch_size: int = 8
    logging_steps: int = 10
    eval_steps: int = 0
    max_eval_batches: int | None = None
    save_steps: int = 0
    save_total_limit: int = 2

    def __post_init__(self) -> None:
        check(self.lr_scheduler_type in KINDS,
              f"train.lr_scheduler_type is {self.lr_scheduler_type!r}; choose one of {', '.join(KINDS)}"
              f"{nearest(self.lr_scheduler_type, KINDS)}")
        check(self.optim in OPTIMIZERS, f"train.optim is {self.optim!r}; choose {', '.join(OPTIMIZERS)}"
                                        f"{nearest(self.optim, OPTIMIZERS)}")
        for name in ("learning_rate", "weight_decay", "eval_steps", "save_steps"):
            check(getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size",
                     "logging_steps", "save_total_limit"):
            check(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_grad_norm", "num_train_epochs"):
            check(getattr(self, name) > 0, f"train.{name} is {getattr(self, name)}; it must be positive")
        for name in ("adam_beta1", "adam_beta2"):
            check(0 <= getattr(self, name) < 1, f"train.{name} is {getattr(self, name)}; it must lie in [0, 1)")
        check(self.adam_epsilon > 0, f"train.adam_epsilon is {self.adam_epsilon}; it must be positive")
        check(self.max_steps == -1 or self.max_steps >= 1,
              f"train.max_steps is {self.max_steps}; it must be at least 1, or -1 to go by train.num_train_epochs")
        check(self.max_eval_batches is None or self.max_eval_batches >= 1,
              f"train.max_eval_batches is {self.max_eval_batches}; it must be at least 1, or null for all")
        check(0 <= self.warmup_ratio <= 1, f"train.warmup_ratio is {self.warmup_ratio}; it must lie in [0, 1]")
        check(self.max_seconds is None or self.max_seconds > 0,
              f"train.max_seconds is {self.max_seconds}; it must be positive, or null")

    @property
    def rows_per_step(self) -> int:
        """Rows of an optimizer step (prompts of a rollout) on one process."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps


class Trainer(Protocol):
    """What `fit` drives. progress_keys: the metrics worth a column on the terminal."""

    progress_keys: tuple[str, ...]

    def step(self, batch: object) -> Metrics: ...
    def evaluate(self, batches: Iterable) -> Metrics: ...
    def samples(self) -> list[dict]: ...
    def state(self) -> dict: ...


class Batches(Protocol):
    """Where batches come from: endless by iteration, one ordered pass by once()."""

    def __len__(self) -> int: ...
    def next(self) -> object: ...
    def once(self) -> Iterator: ...
    def state(self) -> dict: ...


class Stopped(Exception):  # noqa: N818 - not a fault: the user asked for it
    """The user stopped the run and a checkpoint was saved; the message says where. The doors exit with code 130."""


def fit(trainer: Trainer, loader: Batches, held_out: Batches | None, config: TrainConfig, record: RunRecord,
        total_steps: int) -> dict[str, float]:
    """Run `total_steps` steps (or config.max_seconds); returns the last step's metrics, the final evaluation's, and
    time/per_step, seconds per step with evaluations and checkpoints.

    Writes metrics.jsonl, samples.jsonl and checkpoints/ under record.output_dir. The first Ctrl-C finishes the step,
    saves a checkpoint and raises Stopped; the second stops at once. However the loop ends but well, the record says so.
    """
    check(total_steps >= 1, f"the run has {total_steps} steps; it needs at least one")
    started, values = time.perf_counter(), {}
    with (on_record(record), Reporter(record, trainer.progress_keys, total_steps, config) as reporter,
          _interruptible(reporter.progress.announce) as interrupts):
        for step in range(1, total_steps + 1):
            values = _step(trainer, loader) | {"epoch": step / len(loader)}
            reporter.step(step, values, trainer.samples)
            is_stopped = _any(bool(interrupts))
            is_last = is_stopped or step == total_steps or _any(_over(started, config.max_seconds))
            if held_out is not None and not is_stopped and (is_last or _is_due(step, config.eval_steps)):
                evaluated = _evaluate(trainer, held_out, config)
                reporter.evaluated(step, evaluated)
                values |= evaluated
            if is_last or _is_due(step, config.save_steps):
                saved = _save(trainer, loader, record, step, config)
            if is_stopped or (is_last and _any(bool(interrupts))):  # the second: Ctrl-C during evaluation or saving
                raise Stopped(f"stopped after step {step} of {total_steps}; the checkpoint is {saved}")
            if is_last:
                break
        reporter.conclude()
    return values | {"time/per_step": (time.perf_counter() - started) / step}


def _step(trainer: Trainer, loader: Batches) -> dict[str, float]:
    """One trainer step on the next batch: its metrics over all processes, and its seconds."""
    began = time.perf_counter()
    metrics = trainer.step(loader.next())
    return metrics.add("time/step", time.perf_counter() - began).over_ranks().compute()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _over(started: float, limit: float | None) -> bool:
    return limit is not None and time.perf_counter() - started >= limit


def _any(mine: bool) -> bool:
    """Whether any process says so: all must leave the loop after the same step."""
    return bool(max_over_ranks(int(mine)))


def _evaluate(trainer: Trainer, held_out: Batches, config: TrainConfig) -> dict[str, float]:
    batches = held_out.once()
    if config.max_eval_batches is not None:
        batches = (b for _, b in zip(range(config.max_eval_batches), batches, strict=False))
    return {f"eval/{name}": value for name, value in trainer.evaluate(batches).compute().items()}


def _save(trainer: Trainer, loader: Batches, record: RunRecord, step: int, config: TrainConfig) -> Path:
    state = {"trainer": trainer.state(), "loader": loader.state(), "step": step}
    return checkpoint.save(Path(record.output_dir) / "checkpoints", step, state, keep=config.save_total_limit)


@contextmanager
def on_record(record: RunRecord) -> Iterator[None]:
    """Whatever ends the block other than its end, another process's failure too, is written to run.json."""
    try:
        with on_failure(lambda message: record.close("failed", message)):
            yield
    except (Stopped, KeyboardInterrupt):
        record.close("stopped")
        raise
    except Exception as error:
        record.close("failed", f"{type(error).__name__}: {error}")
        raise


@contextmanager
def _interruptible(announce: Callable[[str], None]) -> Iterator[list[int]]:
    """A list that is empty until the first SIGINT; the second raises KeyboardInterrupt as ever."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield seen
        return

    def handle(number: int, _frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        announce("finishing this step, then saving a checkpoint; Ctrl-C once more stops at once")

    before: Callable | int | None = signal.signal(signal.SIGINT, handle)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
