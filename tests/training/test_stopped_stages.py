"""A stage that is stopped leaves the very model that it had, and goes on to the one that it would have had."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybrid_rlhf.cli import main
from hybrid_rlhf.core import activity
from hybrid_rlhf.run import runfile
from tests.factories.stage_options import short_sft


@contextmanager
def interrupted_at(text: str):  # noqa: ANN201
    """Ctrl-C when the process says that it does `text`."""
    with activity.listening(lambda doing: doing == text and os.kill(os.getpid(), signal.SIGINT)):
        yield


def weights(run: str) -> dict[str, torch.Tensor]:
    return load_file(Path(run) / "model" / "model.safetensors")


def are_equal(one: str, other: str) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_model_of_a_stopped_run_is_that_of_its_step(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*short_sft(tmp_path)[:-4], "--train.lr_scheduler_type", "constant", "--train.warmup_ratio", "0",
             "--train.per_device_train_batch_size", "2", "--train.num_fixed_prompts", "1"]
    for steps in (2, 4):
        assert main([*words, "--train.max_steps", str(steps), "--output_dir", f"straight{steps}"]) == 0
    capsys.readouterr()
    again = [*words, "--train.max_steps", "4", "--output_dir", "run"]
    with interrupted_at("step 2"):
        assert main(again) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-5:-1] == ["stopped after step 2 of 4", "model: run/model (of step 2 of 4)", "report: run/report.html",
                            "checkpoint: run/checkpoints/step-00000002"]
    assert lines[-1].startswith("go on: ") and shlex.split(lines[-1])[-len(again):] == again
    assert are_equal("run", "straight2")
    assert main(again) == 0
    record = runfile.read_run("run")
    assert record.is_finished and are_equal("run", "straight4")
    assert "resuming from run/checkpoints/step-00000002" in record.facts["header"]  # with which the report begins


@pytest.mark.parametrize("text", ["exporting the model", "answering the fixed prompts"])
def test_ctrl_c_at_either_end_of_a_run_says_how_it_goes_on(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    words = short_sft(tmp_path)
    with interrupted_at(text):
        assert main(words) == 130
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("go on: ")
    assert runfile.read_run("run").is_finished == (text == "exporting the model")
    assert main(words) == 0 and runfile.read_run("run").is_finished
