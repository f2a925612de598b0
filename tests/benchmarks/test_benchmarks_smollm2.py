"""The page on SmolLM2: its task shares nothing between training and test, and its cells follow from its rows."""

from __future__ import annotations

import json

import smollm2_page
import smollm2_tasks
from smollm2_settings import EXPERIMENTS

from hybrid_rlhf.training.registry import STAGES


def test_no_pair_of_terms_of_the_test_is_trained_on_in_either_order(tmp_path) -> None:
    folder = smollm2_tasks.sums(tmp_path)
    terms = {}
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        words = [row["prompt"][0]["content"].removesuffix("? Answer with a number.").split() for row in rows]
        terms[name] = {frozenset((int(w[2]), int(w[4]))) for w in words}
        assert all(int(w[2]) + int(w[4]) == int(row["answer"]) for w, row in zip(words, rows, strict=True))
        assert name == "train" or len(rows) >= 200
    assert not terms["train"] & terms["test"] and len(terms["train"] | terms["test"]) == 210


def measured(right: int, perplexity: float) -> dict:
    kind = {"right": right, "ended": 1.0, "empty": 0, "length": 9.0}
    return {"items": 200, "greedy": kind, "sampled": kind, "kl": 1.5, "perplexity": perplexity}


def test_a_row_says_accuracy_with_wilson_s_interval_and_how_much_worse_the_perplexity_is() -> None:
    row = {"row": "grpo", "seed": 0, "settings": [], "seconds": 480.0, "cpu_seconds": 700.0, "peak_gib": 5.0,
           "history": {"steps": 16, "entropy": [2.0, 0.5]}, "after": measured(170, 10.4)}
    cells = dict(zip(smollm2_page.COLUMNS, smollm2_page.cells(row, measured(74, 10.0)), strict=True))
    assert cells["greedy"] == "0.850 (0.79-0.89)"  # Wilson by hand: centre .8434, half width .0494
    assert cells["perplexity"] == "10.40 (+4.0%)" and cells["entropy"] == "2.00 to 0.50" and cells["KL"] == "1.50"
    found = {"start": measured(74, 10.0), "machine": "here", "rows": [row]}
    assert "rloo (seed 0)" in smollm2_page.page(found).split("Not run yet:")[1]


def test_rows_of_another_task_and_of_another_machine_are_told_apart() -> None:
    row = {"row": "grpo_gcd", "seed": 0, "settings": [], "seconds": 480.0, "cpu_seconds": 700.0, "peak_gib": 5.0,
           "history": {"steps": 16}, "before": measured(40, 10.0), "after": measured(170, 10.4), "machine": "there"}
    text = smollm2_page.page({"start": measured(74, 10.0), "machine": "here", "rows": [row]})
    assert "On another machine (there): grpo_gcd (seed 0)." in text
    assert "| grpo_gcd | 0 | 200 | 0.200 to 0.850 (0.79-0.89) | 0.200 to 0.850 (0.79-0.89) | 1.00 |" in text


def test_every_row_is_a_stage_that_there_is() -> None:
    assert all(e.stage in STAGES for e in EXPERIMENTS.values())
