"""Tiny data for stages, and options that several stages share, cut down to what each of them has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybrid_rlhf.training.unread_options import of_stage as unused_by
from tests.factories.tiny import save_tiny

_OF_TEXTS = ("data.max_length", "data.train_on", "data.append_eos")  # ppo.ptx_coef and distill.lmbda alone read these

WORDS = ["red", "blue", "green sea", "cat", "a small dog", "fox", "sun", "the moon", "tree", "old book"]
COMMON = ["--model.dtype", "float32", "--data.split", "null", "--data.eval_fraction", "0.25", "--data.max_length", "48",
          "--data.max_prompt_length", "32", "--train.max_steps", "3", "--train.per_device_train_batch_size", "8",
          "--train.learning_rate", "1e-3", "--train.logging_steps", "1"]
PPO = ["--ppo.sampling.max_new_tokens", "6", "--roles.actor.learning_rate", "1e-3", "--roles.critic.learning_rate",
       "1e-3", "--ppo.num_ppo_epochs", "1", "--ppo.num_minibatches", "1"]


def write_rows(folder: Path) -> None:
    """sft.jsonl, reward.jsonl and ppo.jsonl: thirty rows for each of the three stages."""
    asked = [(f"say {word} {i}", word) for i in range(3) for word in WORDS]
    rows: dict[str, list[dict]] = {
        "sft": [{"prompt": prompt, "completion": word} for prompt, word in asked],
        "reward": [{"prompt": prompt, "chosen": word, "rejected": "no no"} for prompt, word in asked],
        "ppo": [{"prompt": prompt} for prompt, _ in asked]}
    for name, table in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


def short_sft(folder: Path) -> list[str]:
    """The command line of two steps of SFT within `folder`, which gets the model and the rows."""
    save_tiny(folder / "base")
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    return ["--stage", "sft", "--model", "base", "--data.sources", "rows.jsonl", "--data.max_length", "64",
            "--train.max_steps", "2", "--output_dir", "run"]


def used(stage: str, words: Iterable[str]) -> list[str]:
    """`words` ("--option value" or "--option=value") without the options that `stage` does not read."""
    words = list(words)
    gone = [*unused_by(stage), *(_OF_TEXTS if "roles.ref.tp" in unused_by(stage) and not _has_texts(words) else ())]
    return [word for given in _options(words) for word in given
            if not any(_name(given) == option or _name(given).startswith(f"{option}.") for option in gone)]


def _has_texts(words: list[str]) -> bool:
    return any(word.startswith(("--ppo.ptx_coef", "--distill.lmbda")) for word in words)


def _name(given: list[str]) -> str:
    return given[0].removeprefix("--").partition("=")[0]


def _options(words: list[str]) -> Iterator[list[str]]:
    """Each option with its value."""
    start = 0
    for end in range(1, len(words) + 1):
        if end == len(words) or words[end].startswith("--"):
            yield words[start:end]
            start = end
