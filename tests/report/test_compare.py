"""Comparing models: intervals, win rates and diversity by numbers worked out by hand; a page that no answer breaks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hybrid_rlhf.report import compare
from hybrid_rlhf.report.compare import Answered, Method


def answered(name: str, scores: list[list[float]], texts: list[list[str]] | None = None, **more) -> Answered:
    table = np.array(scores, float)
    texts = texts or [["an answer"] * table.shape[1]] * table.shape[0]
    return Answered(name, f"runs/{name}", table, {"source": table}, texts, [2.0] * table.size, [True] * table.size,
                    **more)


@pytest.mark.parametrize(("wins", "count", "low", "high"), [
    (8, 10, 0.490162, 0.943318),  # as in Wilson's own formula worked out by hand; the same in R's prop.test
    (0, 10, 0.0, 0.277533),  # z^2 / (n + z^2)
    (10, 10, 0.722467, 1.0),
    (50, 100, 0.403832, 0.596168),
])
def test_the_interval_of_a_win_rate_is_wilsons(wins, count, low, high) -> None:
    assert compare.wilson(wins, count) == pytest.approx((low, high), abs=1e-6)


def test_the_bootstrap_of_many_prompts_is_as_wide_as_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 2000)
    low, high = compare.bootstrap(values, Method(num_resamples=4000))
    half = 1.96 * values.std() / 2000**0.5
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    assert compare.bootstrap(np.full(7, 1.5), Method()) == (1.5, 1.5)
    assert compare.bootstrap(values[:50], Method(num_resamples=500)) == compare.bootstrap(
        values[:50], Method(num_resamples=500))


def test_pairing_finds_a_small_gain_that_the_means_alone_would_not_show() -> None:
    """Prompts differ by 10, models by 0.1: the interval of the gain knows only the latter."""
    start = np.random.default_rng(2).normal(0, 10, (100, 1))
    rows = compare.compare([answered("a", start), answered("b", start + 0.1)], Method(num_resamples=500)).rows
    assert rows[1]["score_gain_interval"] == pytest.approx((0.1, 0.1))
    assert rows[1]["score_interval"][0] < rows[0]["score"] < rows[1]["score_interval"][1]


def test_a_tie_is_half_a_win_and_a_prompt_counts_once_whatever_its_answers() -> None:
    a, b = np.array([[1.0, 1.0], [0.0, 3.0]]), np.array([[2.0, 1.0], [1.0, 2.0]])
    assert compare.win_rates(b, a).tolist() == [0.75, 0.5]
    row = compare.compare([answered("a", a), answered("b", b)], Method(num_resamples=100)).rows[1]
    assert row["win_rate"] == 0.625 and row["ties"] == 0.25 and row["score_gain"] == 0.25
    assert row["win_rate_interval"] == pytest.approx(compare.wilson(1.25, 2))
    assert not row["is_better"] and not row["is_worse"]


def test_answers_without_a_score_are_in_no_mean_and_no_win() -> None:
    nan = np.nan
    a, b = [[1.0, nan], [3.0, 3.0], [2.0, 2.0]], [[2.0, 1.0], [nan, nan], [2.0, nan]]
    found = compare.compare([answered("a", a), answered("b", b)], Method(num_resamples=100))
    first, row = found.rows
    assert (first["score"], row["score"]) == (11 / 5, 5 / 3)
    assert row["win_rate"] == (1 + 0.5) / 2 and row["ties"] == 0.5  # prompts one and three, an answer each
    assert row["score_gain"] == pytest.approx((0.5 + 0.0) / 2)  # 1.5 - 1 and 2 - 2
    shown = compare.examples(["p", "q", "r"], [answered("a", a), answered("b", b)], 3)
    assert [each["answers"]["b"]["score"] for each in shown] == [2.0, None, 2.0]
    assert "| b |  | an answer |" in compare.page(found, shown, {})
    compare.show(found, shown)


def test_distinct_n_counts_different_n_grams_of_all_answers() -> None:
    texts = ["the cat. The cat", "a cat"]  # words: the cat . the cat | a cat
    assert compare.distinct(texts, 1) == pytest.approx(4 / 7)
    assert compare.distinct(texts, 2) == pytest.approx(4 / 5)  # the-cat twice of five
    assert compare.distinct(["one"], 2) == 0.0


def test_the_verdict_says_who_wins_and_with_what_interval() -> None:
    start = [[0.0]] * 100
    found = compare.compare([answered("sft", start), answered("ppo", [[1.0]] * 100), answered("bad", [[-1.0]] * 100),
                             answered("same", start)], Method(num_resamples=50))
    better, worse, same = compare.verdicts(found)
    assert better.startswith("ppo wins more often than it loses against sft: 100.0% of the prompts (95% interval 96.3%")
    assert worse.startswith("bad loses more often than it wins against sft: 0.0%")
    assert same.startswith("same is not told apart by who wins against sft: 50.0%")


def test_files_say_what_was_found_and_hostile_answers_stay_in_their_cells(tmp_path) -> None:
    hostile = "a | b\n| x | <script> `y` \x1b[31m"
    models = [answered("sft", [[1.0], [2.0]], nats=[0.0, 0.0]),
              answered("ppo", [[2.0], [2.0]], [[hostile], ["fine"]], nats=[0.5, 1.5], is_right=[True, False])]
    found = compare.compare(models, Method(num_resamples=100))
    compare.write(tmp_path, found, compare.examples(["say | it", "two"], models, 5), {"prompts": "2 (held out)"})
    stored = json.loads((tmp_path / "evaluate.json").read_text())
    assert [m["model"] for m in stored["models"]] == ["sft", "ppo"]
    assert stored["models"][1]["kl"] == 1.0 and stored["models"][1]["accuracy"] == 0.5
    assert "Wilson" in stored["intervals"]["win_rate"] and "bootstrap" in stored["intervals"]["score"]
    assert len(stored["examples"]) == 2 and stored["examples"][0]["answers"]["ppo"]["completion"] == hostile
    lines = (tmp_path / "evaluate.md").read_text().splitlines()
    row = next(line for line in lines if "script" in line)
    assert row.startswith("| ppo | 2.000 | a \\| b \\| x \\| \\<script\\>") and "\x1b" not in row
    assert next(line for line in lines if line.startswith("| ppo | 2.00 [")).count("|") == 11


def test_the_table_has_a_row_for_each_model(capsys) -> None:
    models = [answered("sft", [[1.0], [2.0]]), answered("ppo", [[2.0], [2.5]])]
    found = compare.compare(models, Method(num_resamples=50))
    compare.show(found, compare.examples(["q", "r"], models, 1))
    out = capsys.readouterr().out
    assert "win rate" in out and "score gain" in out and " KL " not in out and "accuracy" not in out
    assert "ppo: an answer (2.00)" in out
