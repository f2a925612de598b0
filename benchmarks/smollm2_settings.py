"""The settings of every row of smollm2.py: words of the command line. BESIDE stands for the folder of the seed's runs,
START for the chat model's folder, BASE for the same weights without a chat template, SUMS for the task's folder."""

from __future__ import annotations

from typing import NamedTuple


class Experiment(NamedTuple):
    """One row. words: of the command line. seeds: what the page asks for."""

    stage: str
    words: list[str]
    seeds: tuple[int, ...] = (0,)


SEEDS = (0, 1, 2)
_START = "--model.model_name_or_path=START"
_ALL = ["--data.split=null", "--train.num_fixed_prompts=0", "--train.save_minutes=0", "--train.logging_steps=1",
        "--train.max_eval_batches=1"]
_SUMS = [_START, *_ALL, "--data.sources=[{path: SUMS/train.jsonl}]", "--data.eval_fraction=0.02",
         "--reward.functions=builtin:numeric_match", "--ppo.sampling.max_new_tokens=12", "--ppo.sampling.num_samples=8",
         "--train.per_device_train_batch_size=8", "--train.max_steps=16", "--train.warmup_ratio=0"]
_GROUPS = [*_SUMS, "--ppo.num_ppo_epochs=1", "--ppo.kl_coef=0.04"]
_FULL = "--roles.actor.learning_rate=2e-5"
_LORA = "--roles.actor.learning_rate=2e-4"

EXPERIMENTS: dict[str, Experiment] = {
    "grpo": Experiment("grpo", [*_GROUPS, _FULL], SEEDS),
    "rloo": Experiment("rloo", [*_GROUPS, _FULL], SEEDS),
    "grpo_lora16": Experiment("grpo", [*_GROUPS, _LORA, "--model.lora.r=16"]),
    "grpo_lora1": Experiment("grpo", [*_GROUPS, _LORA, "--model.lora.r=1"]),
}
NOTES: list[str] = []  # what the page says beside the figures
