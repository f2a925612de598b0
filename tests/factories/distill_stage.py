"""A folder with a student, a teacher and rows for --stage distill, and the words of a command line over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from tests.factories.stage_options import COMMON, WORDS, used
from tests.factories.tiny import own_cache, save_tiny


@contextmanager
def distill_place(folder: Path) -> Iterator[Path]:
    """The folder, filled, with a cache of its own meanwhile."""
    rows = [{"prompt": f"say {w} {i}"} for i in range(2) for w in WORDS]
    said = [{"prompt": f"say {w} {i}", "completion": w} for i in range(2) for w in WORDS]
    for name, table in (("rows", rows), ("said", said)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    (folder / "pay.py").write_text("def short(completions, **_):\n    return [-float(len(c)) for c in completions]\n")
    save_tiny(folder / "base")
    save_tiny(folder / "teacher", seed=5, hidden_size=48, initializer_range=0.2)
    with pytest.MonkeyPatch.context() as patch:
        own_cache(patch, folder / "cache")
        yield folder


def words(place: Path, out: str, *more: str, stage: str = "distill", teacher: str | None = "teacher") -> list[str]:
    section = "ppo" if stage == "grpo" else stage
    named = [] if teacher is None else ["--roles.teacher.model_name_or_path", f"{place}/{teacher}"]
    return ["--stage", stage, "--output_dir", f"{place}/{out}", *used(stage, [*COMMON, *more]),
            "--model.model_name_or_path", f"{place}/base",
            f"--data.sources=[{{path: {place}/rows.jsonl, stages: [distill, ppo]}}, "
            f"{{path: {place}/said.jsonl, stages: [distill_data, sft]}}]", *named,
            "--roles.actor.learning_rate", "1e-2", "--train.max_steps", "2", "--train.per_device_train_batch_size", "5",
            f"--{section}.sampling.max_new_tokens", "6", *more]


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps(out: Path) -> list[dict]:
    return [row for row in lines(out) if "time/step" in row]


def refused(capfd, argv: list[str]) -> str:
    capfd.readouterr()
    assert main(argv) == 2
    said = capfd.readouterr().err.strip().splitlines()
    return next(line for line in said if line.startswith("error: "))
