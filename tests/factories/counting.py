"""A trainer that only counts and draws, and runs of it that die and are started again."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.run import checkpoint, runfile
from hybrid_rlhf.run.loop import TrainConfig, fit


@dataclass(frozen=True)
class Config:
    output_dir: str
    resume: str = "auto"
    seed: int = 0
    report_to: list[str] = field(default_factory=list)
    train: TrainConfig = field(default_factory=TrainConfig)


class Killed(BaseException):
    """Nothing in the library catches it."""


class Loader:
    def __init__(self) -> None:
        self.taken = 0

    def __len__(self) -> int:
        return 4

    def next(self) -> int:
        self.taken += 1
        return self.taken

    def once(self):
        yield from range(3)

    def state(self) -> dict:
        return {"taken": self.taken}

    def load_state(self, state) -> None:
        self.taken = state["taken"]


class Trainer:
    """Draws from every global generator in every step; `at` runs something in the step on a batch."""

    progress_keys = ("loss",)

    def __init__(self, at: dict | None = None) -> None:
        self.at, self.total = at or {}, torch.zeros(3)

    def step(self, batch: int) -> Metrics:
        drawn = torch.rand(3) + random.random() + np.random.rand() + np.random.randn()
        self.at.get(batch, lambda: None)()
        self.total = self.total + drawn
        return Metrics().add("loss", float(self.total.sum())).add("batch", batch)

    def evaluate(self, batches) -> Metrics:
        return Metrics().add("loss", 10.0 - 3 * (len(list(batches)) + float(self.total[0]) % 1))

    def samples(self) -> list[dict]:
        return [{"completion": f"c{float(self.total[0])}"}]

    def state(self) -> dict:
        return {"total": self.total}

    def load_state(self, state) -> None:
        self.total = state["total"]


def runner(tmp_path: Path):
    """go(name, at, resume=..., **train): one process's part of the run in the folder `name`; 9 steps in all."""
    def run(name: str, at: dict | None = None, resume: str = "auto", steps: int = 9, seed: int = 0,
            held_out: Loader | None = None, **train):
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(7)
        settings = dict(save_steps=2, eval_steps=3, logging_steps=2, save_total_limit=3) | train
        config = Config(str(tmp_path / name), resume, seed, train=TrainConfig(**settings))
        record = runfile.start(config.output_dir, "sft", config, "the command")
        if record.is_finished:
            return record
        trainer = Trainer(at)
        values = fit(trainer, Loader(), held_out or Loader(), config.train, record, steps)
        record.metrics = values
        record.close("finished")
        return record

    return run


def killed() -> None:
    raise Killed


@contextmanager
def killed_at(trainer: type, num_steps: int) -> Iterator[None]:
    """A block that ends where a trainer of this class begins the step after so many."""
    def step(self: Any, batch: object) -> Metrics:
        return killed() if self.num_steps == num_steps else whole(self, batch)

    whole = trainer.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "step", step)
        with pytest.raises(Killed):
            yield


def left(folder: Path) -> dict:
    """What a run leaves, without what the clock and the machine's memory say."""
    def rows(name: str) -> list[dict]:
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(("time/", "memory/"))}
                for line in (folder / name).read_text().splitlines()]

    lines = {name: rows(name) for name in ("metrics.jsonl", "samples.jsonl")}
    state = checkpoint.load(checkpoint.latest(folder / "checkpoints"))
    return lines | {"total": state["trainer"]["total"].tolist(), "step": state["step"],
                    "torch": state["random"]["torch"].tolist(), "python": state["random"]["python"]["words"].tolist(),
                    "numpy": state["random"]["numpy"]["key"].tolist()}
