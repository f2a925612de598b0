"""The list of runs: what is found, what each row says, and that damage is one line of one row."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from hybrid_rlhf.run import lock
from hybrid_rlhf.studio import run_files, runs
from hybrid_rlhf.studio.history_reader import Histories
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


def settle(outputs):
    """As if nothing had changed for a minute: folders that changed a moment ago are read once more."""
    old = time.time() - 60
    for place, folders, _ in os.walk(outputs, topdown=False):
        for name in folders:
            os.utime(os.path.join(place, name), (old, old))
    os.utime(outputs, (old, old))


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
    told = opened(tmp_path).told()
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

    def held(_folder):
        run.finish()  # after run.json was read, and before its lock was tried
        return False

    monkeypatch.setattr(run_files, "is_held", held)
    assert opened(tmp_path).row("a")["status"] == "finished"


def test_looking_takes_no_lock_away_and_makes_no_file(tmp_path, monkeypatch):
    make_run(tmp_path, "a", "sft", 3, "lost")
    (tmp_path / "b").mkdir()
    found, tried = opened(tmp_path), []
    really = run_files.is_held
    monkeypatch.setattr(run_files, "is_held", lambda folder: (tried.append(folder), really(folder))[1])
    before = sorted(tmp_path.rglob("*"))
    for _ in range(5):
        assert by_id(found)["a"]["status"] == "lost"
    assert len(tried) == 1  # a run that is taken up finds its lock free, however often the list is asked for
    lock.claim(tmp_path / "a", "config.yaml")
    try:
        assert really(tmp_path / "a") is True
    finally:
        lock.release(tmp_path / "a")
    assert really(tmp_path / "a") is False and really(tmp_path / "b") is False
    assert sorted(tmp_path.rglob("*")) == before


def test_a_lock_can_be_had_at_once_after_a_look(tmp_path):
    make_run(tmp_path, "a", "sft", 3, "lost")
    for _ in range(200):
        assert run_files.is_held(tmp_path / "a") is False
        lock.claim(tmp_path / "a", "config.yaml")  # UserError where the look still had it
        assert run_files.is_held(tmp_path / "a") is True
        lock.release(tmp_path / "a")


def test_nothing_is_read_twice_while_nothing_changes(tmp_path):
    for i in range(200):
        make_run(tmp_path, f"group{i % 7}/run{i}", ("sft", "ppo", "reward")[i % 3], 2,
                 ("finished", "stopped", "failed", "lost")[i % 4])
    settle(tmp_path)
    found = opened(tmp_path)
    first, _ = found.rows()
    assert len(first) == 200 and found.num_read >= 600
    read, scanned = found.num_read, found._tree.num_scans
    assert found.rows()[0] == first
    assert (found.num_read, found._tree.num_scans) == (read, scanned)
    make_run(tmp_path, "group3/new", "sft", 2)
    assert len(found.rows()[0]) == 201
    assert found.num_read - read == 4 and found._tree.num_scans - scanned <= 2  # the group's folder, and the new one


def test_a_run_that_begins_within_a_tick_of_the_clock_is_seen(tmp_path):
    make_run(tmp_path, "a", steps=1)
    found, now = opened(tmp_path), time.time()
    os.utime(tmp_path, (now, now))
    assert list(by_id(found)) == ["a"]
    make_run(tmp_path, "b", steps=1)
    os.utime(tmp_path, (now, now))  # a file system whose clock has not moved meanwhile
    assert sorted(by_id(found)) == ["a", "b"]


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
    ("", "damaged"), ("{", "damaged"), ("[]", "no JSON object"), ('"x"', "no JSON object"), ("null", "no JSON object"),
    ("[" * 100_000, "damaged"), ('{"a": ' * 5000 + "1" + "}" * 5000, "damaged"), ("{}", "no stage and status"),
    ('{"stage": 3, "status": "running"}', "no stage"), ('{"stage": "sft", "status": "dancing"}', "no stage"),
    ('{"stage": "sft", "status": ["running"]}', "no stage"), ("{\"a\": " + "1" * 10_000 + "}", "damaged"),
    ('{"x": "' + "x" * (5 * 2**20) + '"}', "larger than 4 MiB"), ("\udcff".encode("utf-8", "surrogateescape").decode(
        "latin-1"), "damaged")])
def test_a_damaged_record_is_a_line_of_its_row(tmp_path, text, says):
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad")
    (tmp_path / "bad/run.json").write_text(text)
    rows = by_id(opened(tmp_path))
    assert rows["good"]["error"] is None
    assert rows["bad"]["status"] == "failed" and says in rows["bad"]["error"] and "\n" not in rows["bad"]["error"]


@pytest.mark.parametrize("changes", [
    {"config": None}, {"config": []}, {"config": {"train": 3, "model": [], "roles": {"actor": "x", "ref": None}}},
    {"facts": 3}, {"facts": {"header": {"a": 1}}}, {"facts": {"header": [None, 3, {"x": 1}], "base_model": ["x"]}},
    {"started": 3}, {"started": "yesterday"}, {"started": "0001-01-01T00:00:00+23:00"}, {"started": None},
    {"finished": "soon"}, {"seconds": "long"}, {"seconds": None}, {"seconds": float("nan")}, {"seconds": 10**400},
    {"metrics": [1]}, {"metrics": {"reward": "0.5", "loss": None}}, {"error": {"a": 1}}, {"error": "x" * 10**6},
    {"config": {"train": {"max_steps": "40"}}}, {"config": {"train": {"max_steps": 1.5}}},
    {"config": {"train": {"max_seconds": "4"}}}, {"stage": "s" * 10**5}, {"command": 3}, {"code": None},
    {"config": {"reward": {"models": [3, None], "judge": [], "functions": 5}, "evaluate": {"models": {"a": 1}}}},
    {"config": {"model": {"model_name_or_path": "\ud800"}, "output_dir": ["x"], "roles": {"reward": {
        "model_name_or_path": "\0"}}}}])
def test_strange_values_in_a_record_break_nothing(tmp_path, changes):
    make_run(tmp_path, "good")
    run = make_run(tmp_path, "strange", "ppo", 3)
    rewrite(run, **changes)
    rows = by_id(opened(tmp_path))
    assert rows["good"]["status"] == rows["strange"]["status"] == "finished"
    assert len(json.dumps(rows["strange"])) < 5000 and math.isfinite(rows["strange"]["seconds"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "answers.jsonl", "report.md", "config.yaml", "checkpoints", "model",
                                  "model/config.json"])
@pytest.mark.parametrize("kind", ["gone", "folder", "link", "pipe", "binary"])
def test_a_strange_file_in_a_run_breaks_no_list(tmp_path, name, kind):
    outputs = tmp_path / "outputs"
    make_run(outputs, "good")
    secret = tmp_path / "secret"
    secret.write_text('{"step": 99, "reward": 99.0}\n')
    make = {"gone": lambda _path: None, "folder": Path.mkdir, "link": lambda path: path.symlink_to(secret),
            "pipe": os.mkfifo, "binary": lambda path: path.write_bytes(bytes(range(256)) * 40)}[kind]
    for status in ("finished", "lost", "stopped"):
        make_run(outputs, status, "ppo", 5, status)
        path = outputs / status / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        path.parent.mkdir(exist_ok=True)
        make(path)
    rows = by_id(opened(outputs))
    assert rows["good"]["error"] is None and len(rows) == 4
    for status in ("finished", "stopped"):
        assert rows[status]["status"] == status and rows[status]["step"] != 99
    if (name, kind) in (("metrics.jsonl", "link"), ("metrics.jsonl", "pipe"), ("metrics.jsonl", "folder")):
        assert "metrics.jsonl" in rows["stopped"]["error"]


def test_links_dots_and_depths_are_passed_over(tmp_path):
    outputs, elsewhere = tmp_path / "outputs", tmp_path / "elsewhere"
    make_run(elsewhere, "x")
    for name in ("a/b/c/d", "a/b/c/d/e", ".studio/x", "a/.hidden/y"):
        make_run(outputs, name, steps=1)
    (outputs / "link").symlink_to(elsewhere / "x")
    (outputs / "folders").symlink_to(elsewhere)
    (outputs / "f").mkdir()
    (outputs / "f/run.json").symlink_to(elsewhere / "x/run.json")
    (outputs / "a/model").mkdir()
    make_run(outputs, "a/model/run", steps=1)  # "model" is a run's own folder in a run alone
    assert sorted(by_id(opened(outputs))) == ["a/b/c/d", "a/model/run"]
    for name in ("link", "f", "folders/x", ".studio/x", "a", "../elsewhere/x", ""):
        with pytest.raises(Refused):
            opened(outputs).row(name)


def test_runs_within_a_run_are_found_and_its_own_folders_are_not_searched(tmp_path):
    for name in ("a", "a/inner", "a/checkpoints/x", "a/plots/y"):
        if name.startswith("a/") and name != "a/inner":
            make_run(tmp_path / "a" / name.split("/")[1], name.split("/")[2], steps=1)
        else:
            make_run(tmp_path, name, steps=1)
    assert sorted(by_id(opened(tmp_path))) == ["a", "a/inner"]


def test_what_is_left_out_of_the_list_is_said(tmp_path, monkeypatch):
    make_run(tmp_path, "good", steps=1)
    (tmp_path / "run.json").write_text("{}")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    rows, notes = opened(tmp_path).rows()
    assert [row["id"] for row in rows] == ["good"]
    assert sum("itself a run" in note for note in notes) == sum("no UTF-8" in note for note in notes) == 1
    json.dumps(notes).encode()
    make_run(tmp_path, "second", steps=1)
    monkeypatch.setattr("hybrid_rlhf.studio.run_tree.MAX_RUNS", 1)
    rows, notes = opened(tmp_path).rows()
    assert len(rows) == 1 and any("the others are not shown" in note for note in notes)


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


def test_folders_that_vanish_and_appear_meanwhile_break_nothing(tmp_path):
    make_run(tmp_path, "stays", steps=1)
    found, end = opened(tmp_path), threading.Event()

    def churn():
        while not end.is_set():
            make_run(tmp_path, "comes/goes", "ppo", 2, "failed")
            shutil.rmtree(tmp_path / "comes")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(60):
            rows = by_id(found)
            assert rows["stays"]["status"] == "finished"
    finally:
        end.set()
        thread.join()


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


def test_max_steps_come_from_the_first_lines_or_the_settings(tmp_path):
    run = make_run(tmp_path, "a", steps=3, max_steps=50, settings={"train.max_steps": -1, "train.max_seconds": 4.0})
    found = opened(tmp_path)
    assert (found.row("a")["max_steps"], found.row("a")["max_seconds"]) == (50, 4.0)  # "run: 50 steps of ..."
    run.record["facts"]["header"] = []
    run.write()
    assert found.row("a")["max_steps"] is None
