"""One method of each family learns the embedded task from one SFT and one reward run: answers become right more often.

`make methods` has all of them over three seeds (docs/results/methods.md); bounds here are half of what was found there.
"""

from __future__ import annotations

import json
from pathlib import Path

import methods
import pytest
from methods_settings import METHODS, common

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def start(learned) -> dict[str, float]:
    return methods.start(str(learned), 0)


def trained(learned: Path, name: str) -> dict[str, float]:
    """accuracy, score, kl and length of the method's policy on held-out prompts."""
    words = [w.replace("BESIDE", str(learned)) for w in METHODS[name]]
    methods.launch(["--stage", name, "--seed", "0", *common(name), *words], learned / name)
    return methods.measured(str(learned), 0, name)


@pytest.mark.parametrize(("name", "accuracy", "score"), [
    ("rloo", 0.10, 2.0),  # on-policy without a critic
    ("kto", 0.10, 2.0),  # unpaired
    ("conditional_sft", 0.10, 2.0),
    ("online_dpo", 0.10, 2.0),
    ("rejection", 0.05, 1.0),
])
def test_answers_become_right_more_often_and_score_higher(learned, start, name, accuracy, score) -> None:
    found = trained(learned, name)
    assert found["accuracy"] > start["accuracy"] + accuracy
    assert found["score"] > start["score"] + score


def test_dpo_prefers_what_was_chosen_on_held_out_pairs_and_answers_better(learned, start) -> None:
    found = trained(learned, "dpo")
    rows = [json.loads(line) for line in (learned / "dpo" / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "eval/loss" in row][-1]
    assert held_out["eval/rewards/accuracies"] > 0.75
    assert held_out["eval/loss"] < 0.6  # log 2 = 0.69 at the start
    assert found["accuracy"] > start["accuracy"] + 0.1
    assert found["score"] > start["score"] + 2
