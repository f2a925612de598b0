"""The settings of every row of smollm2.py: words of the command line. BESIDE stands for the folder of the seed's runs,
START for the chat model's folder, BASE for the same weights without a chat template, SUMS for the task's folder,
GYM for that of reasoning-gym's."""

from __future__ import annotations

from typing import NamedTuple


class Experiment(NamedTuple):
    """One row. words: of the command line. seeds: what the page asks for. task: a name of smollm2_tasks.py."""

    stage: str
    words: list[str]
    seeds: tuple[int, ...] = (0,)
    task: str = "sums"


SEEDS = (0, 1, 2)
_START = "--model.model_name_or_path=START"
COMMON = ["--data.split=null", "--train.num_fixed_prompts=0", "--train.save_minutes=0", "--train.logging_steps=1",
          "--train.max_eval_batches=1", "--data.eval_fraction=0.02", "--train.warmup_ratio=0"]
_STEPS = [*COMMON, "--ppo.sampling.num_samples=8", "--train.per_device_train_batch_size=8", "--train.max_steps=24",
          "--train.lr_scheduler_type=constant"]
_ANSWERS = [*_STEPS, "--data.sources=[{path: SUMS/train.jsonl}]", "--ppo.sampling.max_new_tokens=12"]
_GYM = [_START, *_STEPS, "--ppo.sampling.max_new_tokens=24", "--reward.functions=builtin:numeric_match"]
_SUMS = [_START, *_ANSWERS, "--reward.functions=builtin:numeric_match"]
_PAIRS = [*COMMON, "--data.sources=[{path: SUMS/pairs.jsonl}]", "--train.per_device_train_batch_size=8"]
_TALKS = [*COMMON, "--data.sources=[{path: SUMS/talks.jsonl}]", "--train.per_device_train_batch_size=8",
          "--train.max_steps=40"]
_OF_SFT = "--model.model_name_or_path=BESIDE/sft"

EXPERIMENTS: dict[str, Experiment] = {
    "grpo": Experiment("grpo", _SUMS, SEEDS),
    "rloo": Experiment("rloo", _SUMS, SEEDS),
    "ppo": Experiment("ppo", [*_SUMS, "--ppo.kl_coef=0.04"], SEEDS),
    "ppo_kl10": Experiment("ppo", [*_SUMS, "--ppo.kl_coef=0.1"], SEEDS),
    "grpo_lora16": Experiment("grpo", [*_SUMS, "--model.lora.r=16"]),
    "grpo_lora1": Experiment("grpo", [*_SUMS, "--model.lora.r=1"]),
    "dpo": Experiment("dpo", [_START, *_PAIRS, "--train.max_steps=40"]),
    "base_sft": Experiment("sft", ["--model.model_name_or_path=BASE", *_TALKS]),
    "reward": Experiment("reward", [_START, *_PAIRS, "--train.max_steps=40"]),
    "ppo_reward_model": Experiment("ppo", [_START, *_ANSWERS, "--roles.reward.model_name_or_path=BESIDE/reward"]),
    "sft": Experiment("sft", [_START, *_TALKS]),
    "sft_reward": Experiment("reward", [_OF_SFT, *_PAIRS, "--train.max_steps=160", "--data.eval_fraction=0.1",
                                        "--train.max_eval_batches=null"]),
    "sft_ppo": Experiment("ppo", [_OF_SFT, *_ANSWERS, "--roles.reward.model_name_or_path=BESIDE/sft_reward"]),
    "grpo_gcd": Experiment("grpo", [*_GYM, "--data.sources=[{path: GYM/gcd/train.jsonl}]"], task="gcd"),
    "grpo_chain_sum": Experiment("grpo", [*_GYM, "--data.sources=[{path: GYM/chain_sum/train.jsonl}]"],
                                 task="chain_sum"),
    "grpo_bf16": Experiment("grpo", [*_SUMS, "--model.dtype=bfloat16"], SEEDS),
    "ppo_bf16": Experiment("ppo", [*_SUMS, "--ppo.kl_coef=0.04", "--model.dtype=bfloat16"], SEEDS),
}
