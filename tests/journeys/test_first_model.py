"""A user's first model: sixty rows in the guide's formats and commands, and a judge that no stage is paid by."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.factories.tiny import save_tiny
from tests.project.docs_blocks import FIRST_STEPS, ROOT, shell_blocks

EXAMPLE = ROOT / "examples" / "first_model"


def load(name: str) -> ModuleType:
    """A module of the example; by its path, for another example has a judge.py too."""
    spec = importlib.util.spec_from_file_location(f"first_model_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_judge_asks_for_the_capital_the_wish_and_one_short_sentence() -> None:
    good = load("judge").good
    said = ["Lima is the capital of Peru, have a good trip!", "Lima.", "Oslo, have a good trip!", "",
            "I am not sure. " * 6 + "have a good trip!"]
    assert good(said, capital=["Lima"] * 5) == pytest.approx([1, 2 / 3, 2 / 3, 0, 1 / 3])
    assert good([[{"role": "assistant", "content": said[0]}]], capital=["Lima"]) == [1]


def test_the_commands_are_those_of_the_first_steps() -> None:
    in_guide = [c[1:] for b in shell_blocks() if b.page == FIRST_STEPS for c in b.commands]
    for stage in ("sft", "reward", "ppo"):
        assert shlex.split(load("run").STAGES[stage]) in in_guide, f"the guide no longer has the command of {stage}"


def test_an_option_goes_to_the_stage_that_it_names() -> None:
    run = load("run")
    assert run.extras(["--sft.train.max_steps", "20"]) == {"sft": ["--train.max_steps", "20"]}
    sft, *others = run.commands("here", {"sft": ["--seed", "1"]})
    assert sft[-2:] == ["--seed", "1"] and "here" in sft and all("--seed" not in words for words in others)
    with pytest.raises(SystemExit, match=r"--train\.lr names no stage's option"):
        run.extras(["--train.lr", "1"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_journey_ends_in_a_better_model_whose_answers_end(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "start", max_position_embeddings=1024)
    more = {"sft": {"train.learning_rate": "3e-3", "train.max_steps": "150"},
            "reward": {"train.learning_rate": "2e-3", "train.max_steps": "60"},
            "ppo": {"train.max_steps": "6", "roles.actor.learning_rate": "2e-4", "ppo.sampling.max_new_tokens": "48"}}
    words = [w for stage, options in more.items() for name, value in options.items()
             for w in (f"--{stage}.{name}", value)]
    done = subprocess.run([sys.executable, str(EXAMPLE / "run.py"), "--model", model, "--output_dir",
                           str(tmp_path / "out"), *words], capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "out" / "outputs" / "evaluate" / "evaluate.json").read_text())
    start, sft, ppo = found["models"]
    assert ppo["score"] > start["score"] + 0.2 and ppo["is_better"] and sft["is_better"]
    assert ppo["ended"] > 0.9 and "ppo" in done.stdout
    assert all(e["answers"]["ppo"]["completion"].strip() for e in found["examples"])
