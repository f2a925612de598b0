"""The rows and the tables of the benchmarks: what was run, what was missed, and nothing else; prose stays."""

import json

import bench
import harness
import pytest
from harness import Case, Times

from tests.benchmarks.bench_place import entry, move_bench, row


@pytest.fixture
def places(tmp_path, monkeypatch):
    return move_bench(tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    monkeypatch.setattr(harness, "machine", lambda: "a machine")


SFT = Case("SFT", "TRL", 2, 1.4)


def test_a_rate_is_better_where_it_is_larger_and_seconds_where_they_are_fewer():
    ours, peer = Times(2.0, 1.0, 4.0), Times(3.0, 2.0, 8.0)
    rate = harness.timed_row("packed", SFT, [ours, peer], {"floor_ratio": 1.6, "wide": 4.0}, num_tokens=400)
    assert (rate["ours"], rate["peer"], rate["ratio"], rate["unit"]) == (200.0, 400 / 3, 1.5, "tokens/s")
    assert (rate["ours_range"], rate["peer_range"]) == ([100.0, 400.0], [50.0, 200.0])
    assert (rate["floor_ratio"], rate["wide"]) == (1.25, 0.5)
    time = harness.timed_row("step", SFT, [ours, peer])
    assert (time["ours"], time["ratio"], time["ours_range"], time["unit"]) == (2.0, 1.5, [1.0, 4.0], "s/step")
    alone = harness.timed_row("help", SFT, [ours], unit="s")
    assert (alone["peer"], alone["ratio"], "peer_range" in alone) == (None, None, False)


def test_a_row_says_what_is_asked_and_what_was_missed():
    missed = harness.row_of("packed", SFT, 160.0, 100.0, "tokens/s", 1.5)
    assert (missed["asked"], missed["floor_asked"], missed["missed"]) == (">= 2", "<= 1.4", ["ratio", "floor_ratio"])
    assert harness.row_of("packed", SFT, 210.0, 100.0, "tokens/s", 1.3)["missed"] == []
    assert harness.row_of("packed", Case("SFT"), 1.0, None, "s")["missed"] == []


def test_a_target_that_is_missed_is_bold_and_one_that_is_met_is_not():
    cells = bench.cells_of("sft_step", row("packed", ratio=1.6, floor_ratio=1.2, asked=">= 2", missed=["ratio"]))
    assert cells[2:] == ["400 s", "250 s", "**1.60**", ">= 2", "1.20", "", "sft_step packed"]
    assert bench.cells_of("scaling", row("by batch", ours=4.0, peer=None, missed=["ours"]))[2:4] == ["**4.00 s**", ""]


def test_turns_are_counted_after_an_unmeasured_round():
    ours, theirs = iter([9.0, 1.0, 4.0, 2.0]), iter([9.0, 5.0, 5.0, 8.0])
    assert harness.in_turns(3, lambda: next(ours), lambda: next(theirs)) == [Times(2, 1, 4), Times(5, 5, 8)]
    order = []
    harness.alternate(2, lambda: order.append("ours"), lambda: order.append("peer"))
    assert order == ["ours", "peer"] * 3


def test_tables_are_put_in_the_place_of_the_page_s_own_and_its_prose_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n| old |\n|---|\n| 1 |\n\nWhat was seen.\n\n| x | y |\n\nThe end.\n")
    first, second = harness.table_of(["a", "b"], [[1, None], ["x|y", 2.5]]), harness.table_of(["c"], [])
    harness.write_tables(page, first, second)
    text = "# A page\n\n| a | b |\n|---|---|\n| 1 |  |\n| x/y | 2.5 |\n\nWhat was seen.\n\n| c |\n|---|\n\nThe end.\n"
    assert page.read_text() == text
    with pytest.raises(SystemExit, match="has 2 tables, not 1"):
        harness.write_tables(page, first)
    assert page.read_text() == text
    harness.write_tables(tmp_path / "new.md", first, second)
    assert (tmp_path / "new.md").read_text() == first + "\n" + second


def test_only_what_ran_is_in_the_table_and_the_rest_is_named(places):
    (places / "benchmarks.json").write_text(json.dumps({"sft_step": entry(row("packed"))}))
    assert bench.main(["--page"]) == 0
    rows, runs = (places / "benchmarks.md").read_text().split("\n\n")
    assert [line.split("| ")[-1] for line in rows.splitlines()[2:]] == ["sft_step packed |"]
    assert "| sft_step | 2026-01-01 | `python benchmarks/NAME.py --old` | 10 | m |" in runs
    assert [line.split(" | ")[1] for line in runs.splitlines()[2:]].count("not yet") == len(bench.SCRIPTS) - 1


def test_the_committed_page_has_the_tables_of_the_committed_record(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(bench.PAGE.read_text())
    harness.write_tables(page, *bench.tables_of(json.loads(bench.RECORD.read_text())))
    assert page.read_text() == bench.PAGE.read_text()


def test_a_script_that_fails_keeps_the_earlier_figures_and_fails_the_run(places):
    (places / "benchmarks.json").write_text(json.dumps({"sft_step": entry(row("packed"))}))
    bench.main(["--page"])
    before = (places / "benchmarks.md").read_text()
    (places / "benchmarks/sft_step.py").write_text("raise SystemExit(3)\n")
    assert bench.main(["--only", "sft_step"]) == 1
    assert (places / "benchmarks.md").read_text() == before


def test_a_run_replaces_its_own_rows_and_names_its_command(places):
    (places / "benchmarks.json").write_text(json.dumps({"sft_step": entry(row("packed"))}))
    new = json.dumps([row("packed", ratio=2.34)])
    (places / "benchmarks/sft_step.py").write_text(
        f"import sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write({new!r})\n")
    assert bench.main(["--only", "sft_step"]) == 0
    page = (places / "benchmarks.md").read_text()
    assert "2.34" in page
    assert "1.60" not in page
    assert "`python benchmarks/sft_step.py --repeats 3 --micro_batch_tokens 768`" in page
