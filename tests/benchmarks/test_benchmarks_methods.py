"""The table of all methods: its arithmetic by hand, and that what is committed is what the settings of today gave."""

from __future__ import annotations

import json

import methods
import pytest
from methods_settings import METHODS

from hybrid_rlhf.training.registry import STAGES

FOUND = json.loads((methods.ROOT / "docs" / "results" / "methods.json").read_text())
ASKED = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "dpo", "ipo", "hinge", "kto", "orpo",
         "simpo", "conditional_sft", "online_dpo", "rejection")


def row(before: float, after: float, seed: int = 0) -> dict:
    start, end = ({"accuracy": x, "score": -x, "kl": x, "length": 8.0} for x in (before, after))
    return {"method": "ppo", "seed": seed, "seconds": 10.0 + seed, "settings": [], "before": start, "after": end}


def test_a_gain_is_a_mean_over_seeds_with_student_s_interval() -> None:
    rows = [row(0, 1, 0), row(0, 2, 1), row(0, 3, 2)]
    mean, half = methods.gain(rows, "accuracy")  # standard deviation 1, two degrees of freedom
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5))
    found = methods.summary(rows)
    assert found["is_significant"] == {"accuracy": False, "score": False} and found["seconds"] == 11.0
    steady = methods.summary([row(0, 2, 0), row(0, 2.1, 1), row(0, 1.9, 2)])  # 2 +- 0.25, and as much less score
    assert steady["is_significant"] == {"accuracy": True, "score": False}
    assert methods.gain(rows[:1], "score") == (-1.0, float("inf"))
    assert methods.summary(rows[:1])["is_significant"] == {"accuracy": False, "score": False}


def test_every_method_is_there_by_three_seeds_of_today_s_settings_and_has_learned() -> None:
    assert tuple(METHODS) == ASKED and set(ASKED) <= set(STAGES)
    for name in ASKED:
        rows = [r for r in FOUND["rows"] if r["method"] == name]
        assert [r["seed"] for r in rows] == [0, 1, 2]
        assert all(r["settings"] == METHODS[name] for r in rows), f"{name}: run make methods"
        assert methods.summary(rows)["is_significant"]["accuracy"] or methods.summary(rows)["is_significant"]["score"]
    assert [methods.summary([r for r in FOUND["rows"] if r["method"] == n]) for n in ASKED] == FOUND["methods"]
    page = (methods.ROOT / "docs" / "results" / "methods.md").read_text()
    assert all(table in page for table in methods.tables_of(FOUND))
