"""The one loop, driven with a trainer that only counts."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.report.pace import Pace
from hybrid_rlhf.run import checkpoint, loop, runfile
from hybrid_rlhf.run.loop import Stopped, TrainConfig, fit


@dataclass(frozen=True)
class Config:
    output_dir: str
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    train: TrainConfig = field(default_factory=TrainConfig)


class CountingLoader:
    """Batches 0, 1, 2, ...; four make an epoch; once() gives ten."""

    def __init__(self) -> None:
        self.taken, self.passed = 0, []

    def __len__(self) -> int:
        return 4

    def next(self) -> int:
        self.taken += 1
        return self.taken - 1

    def once(self):
        for batch in range(10):
            self.passed.append(batch)
            yield batch

    def state(self) -> dict:
        return {"epoch": 0, "position": self.taken}


class CountingTrainer:
    """Its loss at batch b is 10 b; `at` runs something in the step on a batch."""

    progress_keys = ("loss",)

    def __init__(self, at: dict | None = None) -> None:
        self.batches, self.at, self.evaluations = [], at or {}, 0

    def step(self, batch: int) -> Metrics:
        self.batches.append(batch)
        self.at.get(batch, lambda: None)()
        return Metrics().add("loss", 10 * batch).add("odd", float("nan"))

    def evaluate(self, batches) -> Metrics:
        self.evaluations += 1
        return Metrics().add("seen", len(list(batches)))

    def samples(self) -> list[dict]:
        return [{"prompt": "p", "completion": f"c{len(self.batches)}", "score": float("inf")}]

    def state(self) -> dict:
        return {"count": len(self.batches), "weight": torch.tensor([float(len(self.batches))])}


@pytest.fixture
def begin(tmp_path):
    def start(**settings):
        config = Config(str(tmp_path / "run"), train=TrainConfig(**settings))
        return config.train, runfile.start(config.output_dir, "sft", config, "the command")

    return start


def lines(record, name: str) -> list[dict]:
    """The rows of a jsonl file by a strict reader: no NaN, no Infinity."""
    def refuse(word: str):
        raise AssertionError(f"{word} is not JSON")

    with open(os.path.join(record.output_dir, name), encoding="utf-8") as file:
        return [json.loads(line, parse_constant=refuse) for line in file]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_every_step_is_a_line_of_metrics_with_its_epoch_and_seconds(begin):
    config, record = begin(logging_steps=3)
    trainer, loader = CountingTrainer(), CountingLoader()
    values = fit(trainer, loader, None, config, record, 6)
    rows = lines(record, "metrics.jsonl")
    assert trainer.batches == [0, 1, 2, 3, 4, 5]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert [r["loss"] for r in rows] == [0, 10, 20, 30, 40, 50]
    assert [r["epoch"] for r in rows] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    assert all(r["time/step"] >= 0 and r["odd"] is None for r in rows)
    assert values["loss"] == 50 and values["time/per_step"] > 0
    assert record.status == "running", "finished is what the recipe says after the export"


def test_samples_are_written_at_the_first_the_last_and_every_logged_step(begin):
    config, record = begin(logging_steps=3)
    fit(CountingTrainer(), CountingLoader(), None, config, record, 7)
    rows = lines(record, "samples.jsonl")
    assert [(r["step"], r["completion"]) for r in rows] == [(1, "c1"), (3, "c3"), (6, "c6"), (7, "c7")]
    assert rows[0]["score"] is None


@pytest.mark.parametrize(("eval_steps", "expected"), [(0, [5]), (2, [2, 4, 5]), (5, [5])])
def test_held_out_batches_are_evaluated_when_due_and_once_at_the_end(begin, eval_steps, expected):
    config, record = begin(eval_steps=eval_steps, max_eval_batches=3)
    trainer, held_out = CountingTrainer(), CountingLoader()
    values = fit(trainer, CountingLoader(), held_out, config, record, 5)
    assert [r["step"] for r in lines(record, "metrics.jsonl") if "eval/seen" in r] == expected
    assert values["eval/seen"] == 3 and values["loss"] == 40
    assert held_out.passed == [0, 1, 2] * len(expected), "no batch beyond the limit is even made"


def test_checkpoints_are_saved_when_due_and_at_the_end_and_the_last_are_kept(begin):
    config, record = begin(save_steps=2, save_total_limit=2)
    fit(CountingTrainer(), CountingLoader(), None, config, record, 5)
    folder = os.path.join(record.output_dir, "checkpoints")
    assert sorted(os.listdir(folder)) == ["step-00000004", "step-00000005"]
    state = checkpoint.load(checkpoint.latest(folder))
    assert state["step"] == 5 and state["loader"] == {"epoch": 0, "position": 5}
    assert state["trainer"]["count"] == 5 and state["trainer"]["weight"].tolist() == [5.0]


def test_an_interrupt_in_the_final_evaluation_stops_at_the_next_of_its_batches(begin):
    config, record = begin()
    trainer, held_out = CountingTrainer(), CountingLoader()
    trainer.evaluate = lambda batches: [interrupt() for batch in batches if batch == 2] and Metrics()
    with pytest.raises(Stopped, match="stopped after step 2 of 2"):
        fit(trainer, CountingLoader(), held_out, config, record, 2)
    assert held_out.passed == [0, 1, 2, 3]
    saved = checkpoint.load(checkpoint.latest(os.path.join(record.output_dir, "checkpoints")))
    assert saved["step"] == 2 and saved["owes_evaluation"]


def test_an_interrupt_before_the_first_step_takes_none(begin):
    config, record = begin()
    trainer = CountingTrainer()
    with pytest.raises(Stopped, match="after step 0 of 2"):
        fit(trainer, CountingLoader(), None, config, record, 2, lambda: [interrupt() or {}])
    assert trainer.batches == []


def test_the_second_interrupt_stops_at_once(begin):
    config, record = begin()
    trainer = CountingTrainer({1: lambda: (interrupt(), interrupt())})
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, CountingLoader(), None, config, record, 9)
    assert runfile.read_run(record.output_dir).status == "stopped"
    assert checkpoint.latest(os.path.join(record.output_dir, "checkpoints")) is None


@pytest.mark.parametrize(("name", "value"), [
    ("learning_rate", -1e-5), ("weight_decay", -0.1), ("adam_beta1", 1.0), ("adam_beta2", -0.1), ("adam_epsilon", 0.0),
    ("max_grad_norm", 0.0), ("lr_scheduler_type", "cosin"), ("warmup_ratio", 1.5), ("num_train_epochs", 0.0),
    ("max_steps", 0), ("max_steps", -2), ("max_seconds", 0.0), ("per_device_train_batch_size", 0),
    ("gradient_accumulation_steps", 0), ("per_device_eval_batch_size", 0), ("logging_steps", 0), ("eval_steps", -1),
    ("save_steps", -1), ("save_minutes", -1.0), ("max_eval_batches", 0), ("save_total_limit", 0),
    ("learning_rate", float("nan")), ("save_minutes", float("nan")),
])
def test_a_setting_that_cannot_be_meant_is_refused_by_name(name, value):
    with pytest.raises(UserError, match=rf"^train\.{name} is ") as error:
        TrainConfig(**{name: value})
    assert "\n" not in str(error.value)


def test_trackers_get_the_logged_steps(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = Config(str(tmp_path), report_to=["tensorboard"], train=TrainConfig(logging_steps=2))
    record = runfile.start(config.output_dir, "sft", config, "")
    fit(CountingTrainer(), CountingLoader(), CountingLoader(), config.train, record, 4)
    events = EventAccumulator(str(tmp_path / "trackers" / "sft")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.0), (2, 10.0), (4, 30.0)]
    assert [(e.step, e.value) for e in events.Scalars("eval/seen")] == [(4, 10.0)]


def test_a_dashboard_that_fails_ends_no_run_and_is_told_of_once(tmp_path, monkeypatch, capfd):
    class Broken:
        name = "wandb"

        def log(self, values, step):
            raise ConnectionError("no route to\nthe host")

    monkeypatch.setattr("hybrid_rlhf.run.reporter.start_trackers", lambda *_: [Broken()])
    config = Config(str(tmp_path), train=TrainConfig(logging_steps=1))
    record = runfile.start(config.output_dir, "sft", config, "")
    fit(CountingTrainer(), CountingLoader(), None, config.train, record, 4)
    said = [line for line in capfd.readouterr().err.splitlines() if "wandb" in line]
    words = "report_to wandb has failed and gets nothing more (ConnectionError: no route to the host)"
    assert said == [f"warning: {words}; metrics.jsonl has every step"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_best_checkpoint_that_finds_no_room_is_said_and_training_goes_on(tmp_path, monkeypatch, capfd):
    def full(_path):
        raise checkpoint.SaveError("cannot save a checkpoint in best: No space left on device")

    monkeypatch.setattr(checkpoint, "keep_best", full)
    config = Config(str(tmp_path), train=TrainConfig(eval_steps=2, save_best="eval/seen"))
    record = runfile.start(config.output_dir, "sft", config, "")
    fit(CountingTrainer(), CountingLoader(), CountingLoader(), config.train, record, 4)
    assert "No space left on device; the best checkpoint so far, " in capfd.readouterr().err
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_tracker_that_is_not_there_is_refused_before_anything_is_written(tmp_path):
    config = Config(str(tmp_path / "run"), report_to=["tensorbord"])
    with pytest.raises(UserError, match=r"report_to is 'tensorbord'; choose from .*did you mean tensorboard"):
        runfile.start(config.output_dir, "sft", config, "")
    assert not (tmp_path / "run").exists()


# --- The step that is tried before the first one, for its time

def test_a_rehearsal_on_a_card_waits_for_what_the_card_still_computes(monkeypatch):
    """The launches take no time here, and what was launched 0.5 seconds of each token's."""
    clock, launched = [0.0], []
    mask = torch.ones(4, 3)
    loader = SimpleNamespace(batch_size=4, typical=lambda count: SimpleNamespace(attention_mask=mask[:count]))
    trainer = SimpleNamespace(step=lambda batch: launched.append(0.5 * batch.attention_mask.sum().item()))
    monkeypatch.setattr(loop, "preserved", loop.rehearsal)  # no card's generator here
    monkeypatch.setattr(loop, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: clock.__setitem__(0, clock[0] + launched.pop()))
    assert loop._rehearse(trainer, loader, tokens=12.0) == 6.0


@pytest.mark.parametrize(("first", "count"), [(2, 1), (3, 0)])
def test_a_run_whose_steps_are_done_rehearses_none(monkeypatch, first, count):
    """One that only has its export left goes on where there may be no memory for a step."""
    rehearsed = []
    monkeypatch.setattr(loop, "_rehearse", lambda *_: rehearsed.append(1) or 0.0)
    pace = Pace(3)
    pace.first = first
    reporter = SimpleNamespace(progress=SimpleNamespace(pace=pace), estimate=lambda: None)
    loader = SimpleNamespace(batch_size=4, rows=[{}] * 4, typical=lambda _count: None)
    saver = SimpleNamespace(loader=loader, held_out=None, total_steps=3, trainer=SimpleNamespace(can_rehearse=True),
                            config=SimpleNamespace(eval_steps=0, save_steps=0, max_eval_batches=None))
    loop._forecast(saver, reporter, False, {})
    assert len(rehearsed) == count
