"""The example scripts run, at tiny size."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "three_stages.py"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The script as a module, cut down to two steps per stage and a fresh cache."""
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("three_stages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("SFT", "REWARD", "PPO"):
        tiny = dataclasses.replace(getattr(module, name), max_steps=2, per_device_train_batch_size=4,
                                   max_eval_batches=1)
        monkeypatch.setattr(module, name, tiny)
    return module


def test_thirty_lines_of_python_run_the_three_stages_without_the_launcher(example, tmp_path, monkeypatch, capfd
                                                                          ) -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 30
    assert "train.py" not in text and "cli" not in text and "subprocess" not in text
    monkeypatch.chdir(tmp_path)
    example.main()
    for stage in ("sft", "reward", "ppo"):
        folder = tmp_path / "outputs" / "three_stages" / stage
        record = json.loads((folder / "run.json").read_text())
        assert (record["stage"], record["status"]) == (stage, "finished")
        assert (folder / "model" / "model.safetensors").exists()
    capfd.readouterr()
    example.main()
    assert capfd.readouterr().err.count("nothing to do") == 3


@pytest.mark.parametrize(("stage", "file"), [("reward", "hh_reward/hh_reward.yaml"),
                                             ("all", "story_sentiment/story_sentiment.yaml")])
def test_every_yaml_of_the_examples_is_a_valid_configuration(stage, file, capsys):
    from hybrid_rlhf.cli import main

    with pytest.raises(SystemExit) as done:  # jsonargparse prints and leaves
        main(["--stage", stage, "--config", str(SCRIPT.parent / file), "--print_config"])
    assert done.value.code == 0
    assert "data:" in capsys.readouterr().out
