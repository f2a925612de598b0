"""The example scripts run, at tiny size."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.factories.tiny import own_cache

SCRIPT = Path(__file__).parents[2] / "examples" / "three_stages.py"


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The script as a module, cut down to two steps per stage and a fresh cache."""
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("three_stages", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STEPS = dict.fromkeys(module.STEPS, 2)
    module.SHORT = {"per_device_train_batch_size": 4, "max_eval_batches": 1}
    return module


@pytest.mark.slow
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


@pytest.mark.parametrize(("stage", "file"), [("sft", "tools/sft.yaml"), ("grpo", "tools/grpo.yaml"),
                                             ("reward", "hh_reward/hh_reward.yaml"),
                                             ("all", "story_sentiment/story_sentiment.yaml"),
                                             ("ppo", "verifiable_reward/verifiable_reward.yaml")])
def test_every_yaml_of_the_examples_is_a_valid_configuration(stage, file, capsys):
    from hybrid_rlhf.cli import main

    with pytest.raises(SystemExit) as done:
        main(["--stage", stage, "--config", str(SCRIPT.parent / file), "--print_config"])
    assert done.value.code == 0
    assert "data:" in capsys.readouterr().out


def test_ppo_on_answers_that_can_be_checked_needs_no_reward_model(tmp_path, monkeypatch):
    from hybrid_rlhf.cli import main
    from tests.factories.tiny import save_tiny

    monkeypatch.chdir(SCRIPT.parent.parent)  # the paths in the file are those of a checkout
    assert main(["--stage", "ppo", "--config", "examples/verifiable_reward/verifiable_reward.yaml", "--output_dir",
                 f"{tmp_path}/run", "--model.model_name_or_path", save_tiny(tmp_path / "base"), "--train.max_steps",
                 "2", "--train.per_device_train_batch_size", "4", "--ppo.sampling.max_new_tokens", "8",
                 "--data.max_prompt_length", "192",
                 "--ppo.num_ppo_epochs", "1", f"--data.cache_dir={tmp_path}/cache", "--model.dtype", "float32"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for row in rows[:2]:
        assert row["rewards/is_short/mean"] == 1.0  # 8 tokens are no 40 words
        parts = {n: row[f"rewards/{n}/mean"] for n in ("numeric_match", "repetition_penalty", "is_short")}
        rest = row["reward"] - parts["numeric_match"] - 0.2 * parts["repetition_penalty"] - 0.1 * parts["is_short"]
        assert -1e-5 <= rest <= 0.1 + 1e-5  # shows_its_work, of the rows that it did not skip
        assert 0 <= row.get("rewards/shows_its_work/mean", 0) <= 1
    assert "eval/rewards/numeric_match/mean" in rows[-1]
