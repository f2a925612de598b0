"""The benchmark page says what was run, what was missed, and nothing else."""

import json

import bench
import pytest

from tests.bench_place import bench_with, move_bench


def row(case, **numbers):
    return {"case": case, "ours": 400.0, "peer": 250.0, "ratio": 1.6, "floor_ratio": 1.2, "unit": "tokens/s",
            "machine": "a machine"} | numbers


@pytest.fixture
def places(tmp_path, monkeypatch):
    return move_bench(tmp_path, monkeypatch)


def test_a_target_that_is_missed_is_bold_and_one_that_is_met_is_not():
    assert bench.line_of("sft_step", row("packed")).split(" | ")[4:8] == ["**1.60**", ">= 2", "1.20", "<= 1.4"]
    met = row("packed", ratio=2.1, floor_ratio=1.7)
    assert bench.line_of("sft_step", met).split(" | ")[4:8] == ["2.10", ">= 2", "**1.70**", "<= 1.4"]


def test_only_what_ran_is_in_the_table_and_the_rest_is_named(places, monkeypatch):
    (places / "rows.json").write_text(json.dumps([row("packed")]))
    assert bench_with(monkeypatch, "--take", f"sft_step={places / 'rows.json'}") == 0
    page = (places / "benchmarks.md").read_text()
    assert [line.split("| ")[-1] for line in page.splitlines() if line.startswith("| SFT")] == ["sft_step packed |"]
    assert "GRPO step" not in page
    assert "Not yet run for this page: rollout, ppo_step, grpo_step, reward_step, memory, startup, " \
           "offline_step, server, scaling;" in page


def test_a_script_that_fails_keeps_the_earlier_figures_and_fails_the_run(places, monkeypatch):
    (places / "rows.json").write_text(json.dumps([row("packed")]))
    bench_with(monkeypatch, "--take", f"sft_step={places / 'rows.json'}")
    before = (places / "benchmarks.md").read_text()
    (places / "benchmarks/sft_step.py").write_text("raise SystemExit(3)\n")
    assert bench_with(monkeypatch, "--only", "sft_step") == 1
    assert (places / "benchmarks.md").read_text() == before


def test_a_run_replaces_its_own_rows_and_names_its_command(places, monkeypatch):
    (places / "rows.json").write_text(json.dumps([row("packed")]))
    bench_with(monkeypatch, "--take", f"sft_step={places / 'rows.json'}")
    new = json.dumps([row("packed", ratio=2.34)])
    (places / "benchmarks/sft_step.py").write_text(
        f"import sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write({new!r})\n")
    assert bench_with(monkeypatch, "--only", "sft_step") == 0
    page = (places / "benchmarks.md").read_text()
    assert "2.34" in page
    assert "1.60" not in page
    assert "`python benchmarks/sft_step.py --repeats 3 --micro_batch_tokens 768`" in page


def test_rows_that_are_taken_stand_beside_the_other_cases_with_their_commands(places, monkeypatch):
    (places / "rows.json").write_text(json.dumps([row("packed")]))
    (places / "more.json").write_text(json.dumps([row("memory", unit="MB")]))
    bench_with(monkeypatch, "--take", f"sft_step={places / 'rows.json'}:--cases packed",
               f"sft_step={places / 'more.json'}:--cases memory")
    page = (places / "benchmarks.md").read_text()
    assert "sft_step packed |" in page
    assert "sft_step memory |" in page
    assert "`python benchmarks/sft_step.py --cases packed; python benchmarks/sft_step.py --cases memory`" in page
