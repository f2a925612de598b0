"""Reward hacking is seen and can be prevented: without a KL price the demo's score rises while its answers become
wrong, and the report says so; with the demo's price both rise and no alarm goes off."""

from __future__ import annotations

import json

import methods
import pytest
from methods_settings import OF_PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def words(folder: str, seed: int, kl_coef: float) -> list[str]:
    """The demo's own settings of stage 3, but for the KL coefficient and 150 steps; the checker has weight 0."""
    return ["--stage", "ppo", "--seed", str(seed), *OF_PROMPTS, "--data.sources=[{path: demo/prompts}]",
            "--train.max_steps=150", "--train.per_device_train_batch_size=128", "--train.warmup_ratio=0.05",
            "--train.max_eval_batches=1", "--roles.actor.learning_rate=1e-3", "--roles.critic.learning_rate=2e-3",
            "--ppo.num_ppo_epochs=2", "--ppo.num_minibatches=2", "--ppo.missing_eos_penalty=1.0",
            "--ppo.sampling.max_new_tokens=16", f"--ppo.kl_coef={kl_coef}",
            f"--roles.ref.model_name_or_path={folder}/sft", f"--roles.reward.model_name_or_path={folder}/reward",
            "--reward.functions=builtin:demo_correct", "--reward.weights=[1.0, 0.0]"]


def ends(folder) -> tuple[dict, dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward" in row]
    return steps[0], next(row for row in reversed(rows) if "eval/reward" in row)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
def test_without_a_kl_price_the_reward_model_is_fooled_and_the_report_says_so_with_it_neither(learned, kl_coef) -> None:
    folder = learned / f"hacking{kl_coef}"
    # without a bound of the score: on some processors it rises beyond the default one, of which an alarm tells
    methods.launch([*words(str(learned), 0, kl_coef), *["--ppo.score_clip=null"] * bool(kl_coef)], folder)
    (first, last), report = ends(folder), (folder / "report.md").read_text()
    score, truth = "rewards/model/mean", "rewards/demo_correct/mean"
    assert last[f"eval/{score}"] > first[score] + 2
    if kl_coef:
        assert last[f"eval/{truth}"] > first[truth] + 0.1
        assert "None of the alarms went off." in report
        return
    assert last[f"eval/{truth}"] < first[truth] - 0.1
    assert "- **reward hacking**: the training score rose from" in report and "while demo_correct fell from" in report
    assert "- **KL**: the policy is" in report
