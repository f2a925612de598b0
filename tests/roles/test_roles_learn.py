"""PPO on one shared base learns the embedded demo task, on a 4-bit base too."""

import json

import pytest

from hybrid_rlhf.cli import main

COMMON = ["--model.dtype", "float32", "--data.split=[4, 3, 3]", "--data.eval_fraction", "0.08", "--train.warmup_ratio",
          "0.1", "--train.logging_steps", "50",
          "--train.per_device_eval_batch_size", "256", "--train.max_eval_batches", "1"]
TEXTS = ["--data.max_length", "64"]
PPO = ["--data.max_prompt_length", "40",
       "--train.max_steps", "20", "--train.per_device_train_batch_size", "128", "--roles.actor.learning_rate", "4e-3",
       "--roles.critic.learning_rate", "4e-3", "--ppo.num_ppo_epochs", "2", "--ppo.num_minibatches", "2",
       "--ppo.kl_coef", "0.2", "--ppo.missing_eos_penalty", "1.0", "--ppo.sampling.max_new_tokens", "16"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn")
    common = [*COMMON, f"--data.cache_dir={folder}/cache"]
    assert main(["--stage", "sft", "--output_dir", f"{folder}/sft", *common, *TEXTS, "--model.preset", "demo",
                 "--data.sources=[{path: demo/demonstrations}]", "--train.learning_rate", "4e-3", "--train.max_steps",
                 "600", "--train.per_device_train_batch_size", "64"]) == 0
    assert main(["--stage", "reward", "--output_dir", f"{folder}/reward", *common, *TEXTS, "--model.lora.r", "16",
                 "--data.sources=[{path: demo/preferences}]", "--train.learning_rate", "5e-3", "--train.max_steps",
                 "300", "--train.per_device_train_batch_size", "48"]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [[], ["--model.load_in_4bit", "true"]], ids=["lora", "qlora"])
def test_ppo_on_one_base_raises_the_reward_of_the_demo_task(runs, more):
    out = runs / f"ppo{len(more)}"
    assert main(["--stage", "ppo", "--output_dir", str(out), *COMMON, f"--data.cache_dir={runs}/cache", *PPO, *more,
                 "--data.sources=[{path: demo/prompts}]", "--model.lora.r", "16", "--model.model_name_or_path",
                 f"{runs}/sft", "--roles.reward.model_name_or_path", f"{runs}/reward"]) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sft_reward_and_ppo_over_a_4_bit_base_follow_each_other_and_each_of_them_learns(tmp_path):
    common = [*COMMON, f"--data.cache_dir={tmp_path}/cache"]
    four_bits = [*common, "--model.load_in_4bit", "true", "--model.lora.r", "16", "--model.model_name_or_path"]
    demos = [*TEXTS, "--data.sources=[{path: demo/demonstrations}]", "--train.per_device_train_batch_size", "64"]
    assert main(["--stage", "sft", "--output_dir", f"{tmp_path}/base", *common, *demos, "--model.preset", "demo",
                 "--train.learning_rate", "4e-3", "--train.max_steps", "250"]) == 0
    assert main(["--stage", "sft", "--output_dir", f"{tmp_path}/sft", *four_bits, f"{tmp_path}/base/model", *demos,
                 "--train.learning_rate", "5e-3", "--train.max_steps", "300"]) == 0
    assert main(["--stage", "reward", "--output_dir", f"{tmp_path}/reward", *four_bits, f"{tmp_path}/sft", *TEXTS,
                 "--data.sources=[{path: demo/preferences}]", "--train.learning_rate", "5e-3", "--train.max_steps",
                 "300", "--train.per_device_train_batch_size", "48"]) == 0
    assert main(["--stage", "ppo", "--output_dir", f"{tmp_path}/ppo", *four_bits, f"{tmp_path}/sft", *PPO,
                 "--data.sources=[{path: demo/prompts}]", "--roles.share_base", "true"]) == 0
    last = {name: json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
            for name in ("base", "sft", "reward", "ppo")}
    print({name: {k: v for k, v in rows.items() if k.startswith("eval/")} for name, rows in last.items()})
    assert last["sft"]["eval/loss"] < 0.9 * last["base"]["eval/loss"]
    assert last["reward"]["eval/accuracy"] > 0.65
    rewards = [row["reward"] for row in map(json.loads, (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines())
               if "reward" in row]
    print(rewards, (tmp_path / "sft" / "adapter" / "merge.json").read_text())
    assert sum(rewards[-3:]) / 3 > rewards[0] + 1  # the first is that of the start
