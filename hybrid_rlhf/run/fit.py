"""The one loop: step, report, evaluate, checkpoint, for any object with step()."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybrid_rlhf.algorithms.schedule import KINDS
from hybrid_rlhf.config import check, nearest
from hybrid_rlhf.distributed import sum_over_ranks, world_size
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
        max_grad_norm: Gradients are scaled down to this norm.
        lr_scheduler_type: cosine, linear, constant or constant_with_warmup.
        warmup_ratio: Share of the optimizer steps during which the rate rises linearly.
        num_train_epochs: Passes over the data.
        max_steps: Number of steps; if positive it wins over num_train_epochs.
        max_seconds: Stop after the step that reaches this time; null has no limit.
        per_device_train_batch_size: Rows (prompts for PPO) per process and accumulation step.
        gradient_accumulation_steps: Multiplies the rows of an optimizer step.
        per_device_eval_batch_size: Rows per process in evaluation.
        logging_steps: Steps between two lines of metrics.
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
        for name in ("learning_rate", "weight_decay", "eval_steps", "save_steps"):
            check(getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}; it must not be negative")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size",
                     "logging_steps", "save_total_limit"):
            check(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_grad_norm", "num_train_epochs"):
            check(getattr(self, name) > 0, f"train.{name} is {getattr(self, name)}; it must be positive")
        check(0 <= self.warmup_ratio <= 1, f"train.warmup_ratio is {self.warmup_ratio}; it must lie in [0, 1]")
        check(self.max_seconds is None or self.max_seconds > 0,
              f"train.max_seconds is {self.max_seconds}; it must be positive, or null")


class Trainer(Protocol):
    """What `fit` drives. progress_keys: the metrics worth a column on the terminal."""

    progress_keys: tuple[str, ...]

    def step(self, batch: object) -> Metrics: ...
    def evaluate(self, batches: Iterable) -> Metrics: ...
    def samples(self) -> list[dict]: ...
    def state(self) -> dict: ...


class Batches(Protocol):
    """Where batches come from: endless by iteration, one ordered pass by once()."""

    epoch: int

    def __len__(self) -> int: ...
    def next(self) -> object: ...
    def once(self) -> Iterator: ...
    def state(self) -> dict: ...


class Stopped(Exception):  # noqa: N818 - not a fault: the user asked for it
    """The user stopped the run; a checkpoint was saved."""


def fit(trainer: Trainer, loader: Batches, held_out: Batches | None, config: TrainConfig, record: RunRecord,
        total_steps: int) -> dict[str, float]:
    """Run `total_steps` steps (or config.max_seconds); returns the last step's metrics and the final evaluation's.

    Writes metrics.jsonl, samples.jsonl and checkpoints/ under record.output_dir. The first Ctrl-C finishes the step,
    saves a checkpoint and raises Stopped; the second stops at once.
    """
    started, values, step = time.perf_counter(), {}, 0
    with Reporter(record, trainer.progress_keys, total_steps, config) as reporter, _interruptible() as interrupted:
        while step < total_steps:
            began = time.perf_counter()
            metrics = trainer.step(loader.next())
            step += 1
            metrics.add("time/step", time.perf_counter() - began)
            values = metrics.compute() | {"epoch": loader.epoch}
            reporter.step(step, values, trainer.samples)
            is_last = step == total_steps or _any(_over(started, config.max_seconds) or bool(interrupted))
            if held_out is not None and (is_last or (config.eval_steps and step % config.eval_steps == 0)):
                values |= reporter.evaluated(step, _evaluate(trainer, held_out, config))
            if is_last or (config.save_steps and step % config.save_steps == 0):
                _save(trainer, loader, record, step, config)
            if is_last:
                break
    values["time/per_step"] = (time.perf_counter() - started) / max(1, step)
    if interrupted:
        record.status = "stopped"
        record.write()
        raise Stopped(f"stopped after step {step} of {total_steps}; the checkpoint is in {record.output_dir}")
    return values


def _over(started: float, limit: float | None) -> bool:
    return limit is not None and time.perf_counter() - started >= limit


def _any(mine: bool) -> bool:
    """Whether any process says so: all must leave the loop after the same step."""
    import torch

    return mine if world_size() == 1 else bool(sum_over_ranks(torch.tensor(float(mine))) > 0)


def _evaluate(trainer: Trainer, held_out: Batches, config: TrainConfig) -> dict[str, float]:
    batches = held_out.once()
    if config.max_eval_batches is not None:
        batches = (b for _, b in zip(range(config.max_eval_batches), batches, strict=False))
    return {f"eval/{name}": value for name, value in trainer.evaluate(batches).compute().items()}


def _save(trainer: Trainer, loader: Batches, record: RunRecord, step: int, config: TrainConfig) -> None:
    state = {"trainer": trainer.state(), "loader": loader.state(), "step": step}
    checkpoint.save(Path(record.output_dir) / "checkpoints", step, state, keep=config.save_total_limit)


@contextmanager
def _interruptible() -> Iterator[list]:
    """A list that becomes non-empty at the first SIGINT; the second raises KeyboardInterrupt as ever."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handle(number: int, _frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        print("\nfinishing the step, then saving; once more to stop now", file=sys.stderr)

    before: Callable | int | None = signal.signal(signal.SIGINT, handle)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
