"""The list of runs: what is found, what each row says, and that damage is one line of one row."""

from __future__ import annotations

import os
import shutil
import threading
from datetime import timedelta

import pytest

from hybrid_rlhf.core.own_files import is_locked
from hybrid_rlhf.run import runfile
from hybrid_rlhf.studio import run_history, runs
from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import Refused, Studio
from tests.factories.studio_runs import START, make_run

needs_rights = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


def opened(outputs):
    return RunList(Studio(outputs), Histories())


def by_id(found):
    return {row["id"]: row for row in found.rows()[0]}


def rewrite(run, **changes):
    run.record.update(changes)
    run.write()


def test_a_row_says_what_a_run_is(tmp_path):
    make_run(tmp_path, "demo/sft", steps=20)
    make_run(tmp_path, "demo/reward", "reward", 10, parents=["demo/sft"], started=START + timedelta(hours=1))
    running = make_run(tmp_path, "demo/ppo", "ppo", 7, "running", ["demo/sft", "demo/reward"], max_steps=40,
                       started=START + timedelta(hours=2))
    rows, notes = opened(tmp_path).rows()
    assert notes == [] and [row["id"] for row in rows] == ["demo/ppo", "demo/reward", "demo/sft"]
    ppo, reward, sft = rows
    assert (ppo["stage"], ppo["status"], ppo["step"], ppo["max_steps"]) == ("ppo", "running", 7, 40)
    assert ppo["parents"] == ["demo/sft", "demo/reward"] and ppo["finished"] is None and ppo["error"] is None
    last = running.values(7)
    assert ppo["headline"] == [{"name": "reward", "value": last["reward"]}, {"name": "kl", "value": last["kl"]}]
    assert (sft["status"], sft["step"], sft["max_steps"], sft["has_model"]) == ("finished", 20, 20, True)
    assert sft["started"] == "2026-11-23T14:00:00.000+00:00" and sft["seconds"] == 13.25 and sft["parents"] == ["demo"]
    assert [each["name"] for each in sft["headline"]] == ["loss", "eval/loss", "mean_token_accuracy"]
    assert [each["name"] for each in reward["headline"]] == ["accuracy", "eval/accuracy", "loss"]
    assert reward["parents"] == ["demo/sft"] and not ppo["has_model"]
    size = sum(path.stat().st_size for path in (tmp_path / "demo/sft").rglob("*") if path.is_file())
    assert sft["bytes"] == size
    told = opened(tmp_path).answer()
    assert told["bytes"] == sum(row["bytes"] for row in rows) and told["free"] > 0 and told["folder"] == str(tmp_path)


def test_a_run_whose_process_is_gone_is_lost(tmp_path):
    run = make_run(tmp_path, "a", "ppo", 3, "running")
    found = opened(tmp_path)
    row = found.row("a")
    assert row["status"] == "running" and row["seconds"] < 60
    run.die()
    assert found.row("a")["status"] == "lost"
    run.lock()
    rewrite(run, command="train.py --resume auto")  # as a process that takes it up does, once it has the lock
    assert found.row("a")["status"] == "running"
    run.finish("stopped")
    assert found.row("a")["status"] == "stopped"


def test_a_run_that_ends_while_it_is_looked_at_is_not_lost(tmp_path, monkeypatch):
    run = make_run(tmp_path, "a", "sft", 3, "running")

    def locked(_path):
        run.finish()  # after run.json was read, and before its lock was tried
        return False

    monkeypatch.setattr(runs, "is_locked", locked)
    assert opened(tmp_path).row("a")["status"] == "finished"


def test_looking_takes_no_lock_away_and_makes_no_file(tmp_path, monkeypatch):
    make_run(tmp_path, "a", "sft", 3, "lost")
    (tmp_path / "b").mkdir()
    found, tried = opened(tmp_path), []
    monkeypatch.setattr(runs, "is_locked", lambda path: (tried.append(path), is_locked(path))[1])
    before = sorted(tmp_path.rglob("*"))
    for _ in range(5):
        assert by_id(found)["a"]["status"] == "lost"
    assert len(tried) == 1  # a run that is taken up finds its lock free, however often the list is asked for
    runfile.claim(tmp_path / "a", "config.yaml")
    try:
        assert is_locked(tmp_path / "a/config.yaml") is True
    finally:
        runfile.release(tmp_path / "a")
    assert is_locked(tmp_path / "a/config.yaml") is False and is_locked(tmp_path / "b/config.yaml") is False
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_read_twice_while_nothing_changes(tmp_path):
    for i in range(200):
        make_run(tmp_path, f"group{i % 7}/run{i}", ("sft", "ppo", "reward")[i % 3], 2,
                 ("finished", "stopped", "failed", "lost")[i % 4])
    found = opened(tmp_path)
    first, _ = found.rows()
    assert len(first) == 200 and found.num_read >= 600
    read = found.num_read
    assert found.rows()[0] == first and found.num_read == read
    make_run(tmp_path, "group3/new", "sft", 2)
    assert len(found.rows()[0]) == 201 and found.num_read - read == 4  # record, metrics, size and alarms


def test_what_changes_is_seen(tmp_path):
    run = make_run(tmp_path, "a", "grpo", 3, "running", max_steps=9)
    found = opened(tmp_path)
    assert by_id(found)["a"]["step"] == 3
    run.grow(2)
    assert by_id(found)["a"]["step"] == 5
    run.checkpoint(size=100_000)
    assert by_id(found)["a"]["bytes"] > 100_000
    run.finish("failed", "Traceback (most recent call last)\nthe disk is full")
    row = by_id(found)["a"]
    assert (row["status"], row["error"], row["seconds"]) == ("failed", "the disk is full", 5.75)
    shutil.rmtree(tmp_path / "a")
    assert by_id(found) == {}
    make_run(tmp_path, "a", "sft", 1)
    assert by_id(found)["a"]["stage"] == "sft"


@pytest.mark.parametrize(("text", "says"), [
    ("", "damaged"), ("{", "damaged"), ("[]", "no JSON object"), ("{}", "no stage and status"),
    ('{"stage": "sft", "status": "dancing"}', "no stage"),
    ('{"stage": "sft", "status": "running", "metrics": [1]}', "damaged"),
    ('{"stage": "sft", "status": "running", "error": 3}', "damaged")])
def test_a_damaged_record_is_a_line_of_its_row(tmp_path, text, says):
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad")
    (tmp_path / "bad/run.json").write_text(text)
    rows = by_id(opened(tmp_path))
    assert rows["good"]["error"] is None
    assert rows["bad"]["status"] == "failed" and says in rows["bad"]["error"] and "\n" not in rows["bad"]["error"]


def test_links_dots_and_depths_are_passed_over(tmp_path):
    outputs, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    make_run(elsewhere, "x")
    for name in ("a/b/c/d", "a/b/c/d/e", ".studio/x", "a/.hidden/y"):
        make_run(outputs, name, steps=1)
    (outputs / "link").symlink_to(elsewhere / "x")
    (outputs / "folders").symlink_to(elsewhere)
    (outputs / "a/model").mkdir()
    make_run(outputs, "a/model/run", steps=1)  # "model" is a run's own folder in a run alone
    assert sorted(by_id(opened(outputs))) == ["a/b/c/d", "a/model/run"]
    for name in ("link", "folders/x", ".studio/x", "a", "../elsewhere/x", ""):
        with pytest.raises(Refused):
            opened(outputs).row(name)


def test_runs_within_a_run_are_found_and_its_own_folders_are_not_searched(tmp_path):
    for name in ("a", "a/inner", "a/checkpoints/x", "a/plots/y"):
        if name.startswith("a/") and name != "a/inner":
            make_run(tmp_path / "a" / name.split("/")[1], name.split("/")[2], steps=1)
        else:
            make_run(tmp_path, name, steps=1)
    assert sorted(by_id(opened(tmp_path))) == ["a", "a/inner"]


def test_a_damaged_file_of_metrics_is_a_line_of_its_row(tmp_path):
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad", "ppo", 5, "stopped")
    (tmp_path / "bad/metrics.jsonl").unlink()
    (tmp_path / "bad/metrics.jsonl").mkdir()
    rows = by_id(opened(tmp_path))
    assert rows["good"]["error"] is None and "metrics.jsonl cannot be read" in rows["bad"]["error"]


def test_what_is_left_out_of_the_list_is_said(tmp_path, monkeypatch):
    make_run(tmp_path, "good", steps=1)
    (tmp_path / "run.json").write_text("{}")
    rows, notes = opened(tmp_path).rows()
    assert [row["id"] for row in rows] == ["good"] and ["itself a run" in note for note in notes] == [True]
    monkeypatch.setattr(runs, "MAX_FOLDERS", 1)
    assert any("the others are not shown" in note for note in opened(tmp_path).rows()[1])


@needs_rights
def test_what_may_not_be_read_is_said(tmp_path):
    make_run(tmp_path, "good", steps=1)
    make_run(tmp_path, "a", steps=1)
    (tmp_path / "a/run.json").chmod(0)
    (tmp_path / "closed").mkdir(mode=0)
    rows, notes = opened(tmp_path).rows()
    assert any("closed cannot be read" in note for note in notes)
    assert "cannot be read" in {row["id"]: row for row in rows}["a"]["error"]
    (tmp_path / "closed").chmod(0o700)


def test_alarms_are_those_of_the_report_or_of_the_metrics(tmp_path):
    def falling(step):
        return {"reward": 1.0 + step, "reward_std": 1.0, "completions/mean_length": 40.0 - 3 * step, "loss": 0.1}

    run = make_run(tmp_path, "a", "grpo", 10, "stopped", values=falling)
    found = opened(tmp_path)
    assert found.row("a")["alarms"] == 1 and [a.name for a in found.alarms("a")] == ["length collapse"]
    run.finish()
    (tmp_path / "a/report.md").write_text("# Report\n\n## Alarms\n\n- **KL**: too far.\n- **tools fail**: all of "
                                          "them.\n\n## Curves\n\n- **none**: of the alarms\n")
    assert [(a.name, a.text) for a in found.alarms("a")] == [("KL", "too far."), ("tools fail", "all of them.")]
    (tmp_path / "a/report.md").write_text("# Report\n\n## Alarms\n\nNone of the alarms went off.\n\n## Curves\n")
    assert found.row("a")["alarms"] == 0
    (tmp_path / "a/report.md").unlink()
    assert found.row("a")["alarms"] == 1


def test_alarms_of_large_files_wait_for_the_next_look(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "ALARM_READ", 1)
    for name in ("a", "b"):
        make_run(tmp_path, name, "grpo", 10, "stopped")
    found = opened(tmp_path)
    assert sorted(str(row["alarms"]) for row in found.rows()[0]) == ["0", "None"]
    assert [row["alarms"] for row in found.rows()[0]] == [0, 0]


def test_the_list_is_there_while_alarms_are_looked_for(tmp_path, monkeypatch):
    is_looking, may_end, look = threading.Event(), threading.Event(), runs.alarms_of

    def slow(*given):
        is_looking.set()
        assert may_end.wait(30)
        return look(*given)

    make_run(tmp_path, "a", "grpo", 10, "stopped")
    found = opened(tmp_path)
    monkeypatch.setattr(runs, "alarms_of", slow)
    thread = threading.Thread(target=found.rows)
    thread.start()
    try:
        assert is_looking.wait(30)
        assert [row["alarms"] for row in found.rows()[0]] == [None]
    finally:
        may_end.set()
        thread.join()
    assert [row["alarms"] for row in found.rows()[0]] == [0]


def test_one_look_for_alarms_reads_a_part_of_a_large_file(tmp_path, monkeypatch):
    run = make_run(tmp_path, "a", "grpo", 10, "stopped")
    monkeypatch.setattr(run_history, "ALARM_READ", (run.folder / "metrics.jsonl").stat().st_size // 2)
    found = opened(tmp_path)
    assert [found.rows()[0][0]["alarms"] for _ in range(4)] == [None, 0, 0, 0]
    read = found.num_read
    assert found.row("a")["alarms"] == 0 and found.num_read == read


def test_max_steps_come_from_the_first_lines_or_the_settings(tmp_path):
    run = make_run(tmp_path, "a", steps=3, max_steps=50, settings={"train.max_steps": -1, "train.max_seconds": 4.0})
    found = opened(tmp_path)
    assert (found.row("a")["max_steps"], found.row("a")["max_seconds"]) == (50, 4.0)  # "run: 50 steps of ..."
    run.record["facts"]["header"] = []
    run.write()
    assert found.row("a")["max_steps"] is None
