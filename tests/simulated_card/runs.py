"""Whole runs of the launcher, tiny, for tests and for the sweep of allocations that fail."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from hybrid_rlhf.cli import main
from tests.factories.stage_options import PPO, used, write_rows
from tests.factories.tiny import save_tiny
from tests.simulated_card import simulated_card

TRAIN = ["--model.dtype", "float32", "--data.max_length", "48", "--data.max_prompt_length", "32", "--train.max_steps",
         "2", "--train.per_device_train_batch_size", "8", "--train.learning_rate", "1e-2", "--train.logging_steps", "1",
         "--train.num_fixed_prompts", "0"]
LORA = ["--model.lora.r", "4"]


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def prepare(folder: Path) -> None:
    """A model, rows for every stage and a reward function."""
    save_tiny(folder / "base")
    write_rows(folder)
    (folder / "rewards.py").write_text(
        "def short(completions):\n    return [1 / (1 + len(text)) for text in completions]\n")


def words(stage: str, *more: str, data: str | None = None) -> list[str]:
    """The command line of two steps of a stage, in a folder that `prepare` has filled."""
    online = stage in ("ppo", "grpo", "rloo", "online_dpo")
    source = data or ("ppo" if online else stage if stage in ("sft", "reward") else "reward")
    given = ["--stage", stage, "--model.model_name_or_path", "base", "--data.sources", f"{source}.jsonl", *TRAIN,
             *(PPO if online else []), *more]
    return [*used(stage, given)]


def metrics(folder: Path) -> list[dict[str, float]]:
    """The steps of a run, without what the clock and the memory say."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    clocked = ("time/", "memory/", "engine/")
    return [{k: v for k, v in json.loads(line).items()
             if not k.startswith(clocked) and not k.endswith("micro_batch_tokens")} for line in lines]


def interpreted(command: list[str]) -> int:
    """A run by Triton's kernels in their interpreter (TRITON_INTERPRET=1). Prints the launches of all and, without what
    the kernels are tried by before they are used, those of its backward passes."""
    own, found = torch.Tensor.backward, Counter()

    def backward(*given: object, **named: object) -> None:
        before = card.launches.copy()
        own(*given, **named)
        found.update(card.launches - before)

    with simulated_card(has_triton=True) as card, mock.patch.object(torch.Tensor, "backward", backward):
        code = main(command)
    print(json.dumps([card.launches, found]))
    return code


if __name__ == "__main__":
    sys.exit(interpreted(sys.argv[1:]))
