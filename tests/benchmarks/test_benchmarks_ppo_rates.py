"""The table of PPO over rates: its cells by hand, and that what is committed is what the settings of today gave."""

from __future__ import annotations

import json

import ppo_rates

FOUND = json.loads((ppo_rates.ROOT / "docs" / "results" / "ppo_rates.json").read_text())


def row(score: float, kl: float, **more: object) -> dict:
    return {"task": "demo", "setting": "before", "rate": 1e-3, "seed": 0, "cpu_seconds": 20.0,
            "after": {"score": score, "kl": kl}, "history": {"kl": 99.0}} | more


def test_a_cell_has_the_mean_score_each_seed_s_the_mean_kl_and_what_failed() -> None:
    rows = [row(0.5, 1.0), row(0.75, 3.0)]
    assert ppo_rates.cell(rows) == "**0.62** (0.50 0.75), 2.0"
    ended = {"task": "demo", "setting": "before", "rate": 1e-3, "seed": 2, "failed": "error: not finite"}
    assert ppo_rates.cell([*rows, ended]) == "**0.62** (0.50 0.75), 2.0; 1 failed"
    assert (ppo_rates.cell([ended]), ppo_rates.cell([])) == ("1 failed", "")
    story = row(0.5, 0) | {"after": {"score": 0.5, "distinct_2": 0.25}}
    assert ppo_rates.cell([story]) == "**0.50**, 99.0, distinct-2 0.25"  # the KL as the run measured it


def test_a_table_has_a_line_for_each_setting_and_a_column_for_each_rate() -> None:
    rows = [row(0.5, 1.0), row(0.25, 9.0, rate=1e-2, cpu_seconds=30.0)]
    demo = ppo_rates.tables_of({"machine": "here", "rows": rows})[1].splitlines()
    assert demo[0] == "| demo: accuracy, KL | 0.0003 | 0.001 | 0.003 | 0.01 | CPU s |"
    assert demo[2:] == ["| before |  | **0.50**, 1.0 |  | **0.25**, 9.0 | 25 |"]


def test_every_row_is_of_today_s_settings_and_the_page_says_what_the_rows_do() -> None:
    for each in FOUND["rows"]:
        assert each["words"] == ppo_rates.words_of(each["task"], each["setting"], each["rate"]), "run the benchmark"
    page = (ppo_rates.ROOT / "docs" / "results" / "ppo_rates.md").read_text()
    assert all(table in page for table in ppo_rates.tables_of(FOUND))


def test_ppo_holds_at_ten_times_the_good_rate_of_the_demo_where_it_did_not() -> None:
    def scores(setting: str, rate: float) -> list[float]:
        return [r["after"]["score"] for r in FOUND["rows"] if (r["task"], r["setting"], r["rate"]) == (
            "demo", setting, rate)]

    good, held, was = scores("before", 1e-3), scores(ppo_rates.DEFAULT, 1e-2), scores("before", 1e-2)
    assert len(good) == len(held) == len(was) == 3
    assert min(held) > 0.7 > 0.2 > max(was)
    assert all(new > old - 0.02 for new, old in zip(scores(ppo_rates.DEFAULT, 1e-3), good, strict=True))
