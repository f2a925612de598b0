"""The settings of every row of smollm2.py: words of the command line. BESIDE stands for the folder of the seed's runs,
START for the chat model's folder, BASE for the same weights without a chat template, SUMS for the task's folder."""

from __future__ import annotations

from typing import NamedTuple


class Experiment(NamedTuple):
    """One row. words: of the command line. seeds: what the page asks for. needs: rows that must be there before."""

    stage: str
    words: list[str]
    seeds: tuple[int, ...] = (0,)
    needs: tuple[str, ...] = ()


_START = ["--model.model_name_or_path=START"]
_ALL = ["--data.split=null", "--train.num_fixed_prompts=0", "--train.save_minutes=0", "--train.logging_steps=1",
        "--train.max_eval_batches=1"]
_SUMS = [*_ALL, "--data.sources=[{path: SUMS/train.jsonl}]", "--data.eval_fraction=0.02",
         "--ppo.sampling.max_new_tokens=12"]
_PAID = [*_SUMS, "--reward.functions=builtin:numeric_match"]
_GROUPS = ["--train.per_device_train_batch_size=8", "--ppo.sampling.num_samples=8"]
_ALONE = ["--train.per_device_train_batch_size=64"]
_STEPS = ["--train.max_steps=16"]
SEEDS = (0, 1, 2)

NOTES: list[str] = []  # what the page says beside the figures

EXPERIMENTS: dict[str, Experiment] = {
    "grpo": Experiment("grpo", [*_START, *_PAID, *_GROUPS, *_STEPS], SEEDS),
    "rloo": Experiment("rloo", [*_START, *_PAID, *_GROUPS, *_STEPS], SEEDS),
    "ppo": Experiment("ppo", [*_START, *_PAID, *_ALONE, *_STEPS], SEEDS),
}
