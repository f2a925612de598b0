"""Process reward models through the launcher, and that a policy learns to write the steps that one likes."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.cli import main
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards.mixture import Mixture, Part
from hybrid_rlhf.rewards.process_reward_model import ProcessSource, steps_of
from hybrid_rlhf.roles import Actor, Roles
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.trainers.ppo import PPOConfig, PPOTrainer
from tests.factories.prm import save_prm
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny, tiny_config, tiny_tokenizer
from tests.factories.trainers import policy, trained
from tests.factories.trl_prm import trl_row

SUMS, DIVIDES = "rewards single steps or turns, and", "divides each step's reward by the number of steps"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("process")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {w}"}) + "\n" for w in WORDS))
    save_tiny(folder / "base")
    save_prm(folder / "prm")
    (folder / "acts.py").write_text("class Game:\n    def step(self, messages):\n        return 1.0, True\n")
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def launch(folder: Path, stage: str, out: str, *more: str, code: int = 0) -> list[dict]:
    section = "online" if stage == "online_dpo" else "ppo"
    argv = ["--stage", stage, "--output_dir", f"{folder}/{out}", *used(stage, COMMON), "--reward.models",
            f"{folder}/prm", f"--data.sources=[{{path: {folder}/rows.jsonl}}]", "--train.max_steps", "2",
            "--model.model_name_or_path", f"{folder}/base", "--train.per_device_train_batch_size", "2",
            f"--{section}.sampling.max_new_tokens", "6", f"--{section}.sampling.num_samples", "2",
            "--roles.actor.learning_rate", "1e-3", "--train.save_steps", "100"]
    assert main([*argv, *more]) == code
    log = folder / out / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize(("stage", "reduce", "said"), [
    ("process_grpo", "each", DIVIDES), ("ppo", "each", None), ("grpo", "min", None),
    ("grpo", "each", f"{SUMS} ppo.estimator grpo reads their sum"),
    ("online_dpo", "sum", f"{SUMS} this method reads their sum")])
def test_where_rewards_of_steps_are_added_up_a_line_says_so_and_names_who_does_not(place, capfd, stage, reduce, said):
    critic = ["--roles.critic.learning_rate", "1e-3"] if stage == "ppo" else []
    rows = launch(place, stage, f"{stage}-{reduce}", "--reward.options", f"{{prm: {{reduce: {reduce}}}}}", *critic)
    assert all(row["reward"] == pytest.approx(row["rewards/prm/mean"], abs=1e-6) for row in rows) and len(rows) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if SUMS in line or DIVIDES in line]
    assert [said in line for line in lines] == [True] * (said is not None)
    assert not lines or reduce == "sum" or "gae, reinforce_pp, process_grpo" in lines[0] or "{reduce: sum}" in lines[0]


def test_the_plan_counts_it_and_episodes_are_refused_before_weights_are_read(place, capsys):
    launch(place, "grpo", "planned", "--plan")
    assert re.search(r"reward prm +", capsys.readouterr().out)
    launch(place, "grpo", "episodes", "--environment.factory", f"{place}/acts.py:Game", code=2)
    assert "reads responses of one turn; leave out environment" in capsys.readouterr().err


def test_models_are_compared_by_the_steps_that_they_write(place):
    save_tiny(place / "other", seed=5, initializer_range=0.2)
    assert main(["--stage", "evaluate", "--output_dir", f"{place}/compared", "--data.split", "null",
                 "--evaluate.models", f"[{place}/base, {place}/other]", "--reward.models", f"{place}/prm",
                 f"--data.sources=[{{path: {place}/rows.jsonl}}]", "--evaluate.rows", "all", "--model.dtype", "float32",
                 "--evaluate.sampling.max_new_tokens", "8", "--data.max_prompt_length", "64",
                 "--evaluate.num_resamples", "200"]) == 0
    found = json.loads((place / "compared" / "evaluate.json").read_text())
    assert found["reward_sources"] == "prm" and all(0 < model["score"] < 1 for model in found["models"])


CHARS = [tiny_tokenizer().decode([i]) for i in range(4, 8)]
SEPARATOR, BAD = CHARS[0], CHARS[2]


def fitted_prm(folder: Path) -> str:
    """A model that TRL's rows and its loss (cross-entropy at the labels) have taught that a step with BAD is wrong."""
    from transformers import AutoModelForTokenClassification

    draw, tokenizer = random.Random(0), tiny_tokenizer()
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(tiny_config(num_labels=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        drawn = [["".join(draw.choices(CHARS[1:], k=draw.randint(1, 4))) for _ in range(4)] for _ in range(32)]
        rows = [trl_row({"prompt": "x", "completions": steps, "labels": [BAD not in s for s in steps]}, tokenizer,
                        SEPARATOR) for steps in drawn]
        width = max(len(row["input_ids"]) for row in rows)
        ids, labels = (torch.tensor([row[key] + [fill] * (width - len(row[key])) for row in rows])
                       for key, fill in (("input_ids", 0), ("labels", -100)))
        loss = model(input_ids=ids, attention_mask=ids != 0, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow  # learning
def test_a_policy_learns_to_write_the_steps_that_a_model_trained_in_trl_s_form_likes(tmp_path):
    """From a random one over eight tokens, of which one in three steps is right; nothing else pays."""
    path, tokenizer = fitted_prm(tmp_path / "prm"), tiny_tokenizer()
    for estimator in ("process_grpo", "reinforce_pp"):
        source = ProcessSource(path, "prm", separator=SEPARATOR, dtype="float32", policy_tokenizer=tokenizer,
                               reduce="sum" if estimator == "process_grpo" else "each")
        source.open()
        config = PPOConfig(sampling=SamplingConfig(max_new_tokens=24, num_samples=4), num_ppo_epochs=1,
                           num_minibatches=1, kl_coef=0.0, missing_eos_penalty=0.0, estimator=estimator)
        actor = Actor(trained(policy(0, vocab_size=8), 1e-2), tokenizer)
        run, right = PPOTrainer(Roles(actor, None), Mixture([Part(source)]), config, seed=0), []
        for _ in range(35):
            run.step(Prompts([[4, 5]] * 8, ["x"] * 8))
            steps = [step.text for text in run.last_rollout.completions for step in steps_of(text, SEPARATOR)]
            right.append(sum(BAD not in step for step in steps) / len(steps))
        assert right[0] < 0.5 and sum(right[-5:]) / 5 > 0.9, (estimator, right)
