"""--stage all with other reward sources beside the model that its second stage leaves."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.training import all_stages
from hybrid_rlhf.training.reward_sources import RewardConfig
from tests.factories.stage_options import COMMON, PPO, WORDS
from tests.factories.tiny import save_tiny

ROWS = {"sft": [{"prompt": f"say {w} {i}", "completion": w} for i in range(2) for w in WORDS],
        "reward": [{"prompt": f"say {w} {i}", "chosen": w, "rejected": "no no"} for i in range(2) for w in WORDS],
        "ppo": [{"prompt": f"say {w} {i}"} for i in range(2) for w in WORDS]}


def run(tmp_path, *more: str) -> int:
    """One step of each stage, on rows of its own."""
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    sources = ", ".join(f"{{path: '{tmp_path}/{name}.jsonl', stages: [{name}]}}" for name in ROWS)
    schedules = [word for name in ROWS for word in (f"--stages.{name}.max_steps", "1")]
    common = COMMON[:COMMON.index("--train.max_steps")]
    return main(["--stage", "all", "--output_dir", f"{tmp_path}/all", *common, *PPO, *schedules,
                 f"--data.sources=[{sources}]", f"--data.cache_dir={tmp_path}/cache", "--model.model_name_or_path",
                 save_tiny(tmp_path / "base"), *more])


@pytest.mark.slow
def test_without_held_out_prompts_the_stages_are_not_compared_and_a_line_says_so(tmp_path, capsys) -> None:
    assert run(tmp_path, "--data.eval_fraction", "0") == 0
    assert "the stages are not compared: no prompt was held out" in capsys.readouterr().err
    assert not (tmp_path / "all" / "summary.json").exists()


@pytest.mark.slow
def test_without_held_out_pairs_the_others_are_compared(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(ROWS, "reward", ROWS["reward"][:3])  # none of which is held out
    assert run(tmp_path) == 0
    assert "reward model: no pair was held out" in capsys.readouterr().out
    summary = json.loads((tmp_path / "all" / "summary.json").read_text())
    assert summary["reward"] == {"accuracy": None} and summary["ppo"]["length"] > 0


def test_ppo_is_paid_by_functions_and_by_the_model_of_stage_two(tmp_path) -> None:
    (tmp_path / "pay.py").write_text("def short(completions, **_):\n    return [-float(len(c)) for c in completions]\n")
    assert run(tmp_path, f"--reward_sources.functions=['{tmp_path}/pay.py:short']",
               "--reward_sources.weights=[1.0, 0.5]") == 0
    first = json.loads((tmp_path / "all" / "ppo" / "metrics.jsonl").read_text().splitlines()[0])
    assert {"rewards/model/mean", "rewards/short/mean"} <= first.keys()
    record = json.loads((tmp_path / "all" / "ppo" / "run.json").read_text())
    assert record["facts"]["reward_model"] == f"{tmp_path}/all/reward"


def test_who_pays_follows_from_the_stages_that_run() -> None:
    paid = RewardConfig(functions=["a.py:f"])
    named = all_stages.stage_configs(all_stages.Config(reward_sources=paid))["ppo"]
    assert named.reward is paid and named.roles.reward.model_name_or_path == "outputs/all/reward"
    alone = all_stages.stage_configs(all_stages.Config(reward_sources=paid, run_stages=["sft", "ppo"]))["ppo"]
    assert not alone.reward.has_model(alone.roles)
    plain = all_stages.stage_configs(all_stages.Config())["ppo"]
    assert plain.reward.has_model(plain.roles) and plain.roles.reward.model_name_or_path is None
