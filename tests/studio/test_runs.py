"""The list of runs: what is found, what each row says, its parents, and that damage is one line of one row."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest

from hybrid_rlhf.cli import read_settings
from hybrid_rlhf.core.own_files import is_locked
from hybrid_rlhf.core.strict_json import plain
from hybrid_rlhf.run import runfile
from hybrid_rlhf.studio import run_files, runs
from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.runs import RunList, parent_names, parents_of
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.training.registry import STAGES
from tests.factories.studio_runs import START, make_run


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
    assert row["status"] == "running" and row["seconds"] < 600
    run.die()
    assert found.row("a")["status"] == "lost"
    run.lock()
    rewrite(run, command="train.py --resume auto")  # as a process that takes it up does, once it has the lock
    assert found.row("a")["status"] == "running"
    run.finish("stopped")
    assert found.row("a")["status"] == "stopped"


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


def counted(monkeypatch, module, name, calls):
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: (calls.append(name), function(*given))[1])


def test_nothing_is_read_twice_while_nothing_changes(tmp_path, monkeypatch):
    for i in range(200):
        make_run(tmp_path, f"group{i % 7}/run{i}", ("sft", "ppo", "reward")[i % 3], 2,
                 ("finished", "stopped", "failed", "lost")[i % 4])
    found, read = opened(tmp_path), []
    for module, name in ((runs, "read_record"), (runs, "_last_metrics"), (run_files, "size_of"), (Histories, "alarms")):
        counted(monkeypatch, module, name, read)
    first, _ = found.rows()
    assert len(first) == 200 and len(read) >= 600
    read.clear()
    assert found.rows()[0] == first and read == []
    make_run(tmp_path, "group3/new", "sft", 2, "stopped")
    assert len(found.rows()[0]) == 201 and sorted(read) == ["_last_metrics", "alarms", "read_record", "size_of"]


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


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"stage": "sft", "status": "running", "error": 3}'])
def test_a_damaged_record_is_a_line_of_its_row(tmp_path, text):
    make_run(tmp_path, "good")
    make_run(tmp_path, "bad")
    (tmp_path / "bad/run.json").write_text(text)
    rows = by_id(opened(tmp_path))
    assert rows["good"]["error"] is None
    assert rows["bad"]["status"] == "failed" and rows["bad"]["error"].startswith("run.json is damaged: ")
    assert "\n" not in rows["bad"]["error"]


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


def test_what_is_left_out_of_the_list_is_said(tmp_path, monkeypatch):
    make_run(tmp_path, "good", steps=1)
    (tmp_path / "run.json").write_text("{}")
    rows, notes = opened(tmp_path).rows()
    assert [row["id"] for row in rows] == ["good"] and ["itself a run" in note for note in notes] == [True]
    monkeypatch.setattr(runs, "MAX_FOLDERS", 1)
    assert any("the others are not shown" in note for note in opened(tmp_path).rows()[1])


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


def test_max_steps_come_from_the_first_lines_or_the_settings(tmp_path):
    run = make_run(tmp_path, "a", steps=3, max_steps=50, settings={"train.max_steps": -1, "train.max_seconds": 4.0})
    found = opened(tmp_path)
    assert (found.row("a")["max_steps"], found.row("a")["max_seconds"]) == (50, 4.0)  # "run: 50 steps of ..."
    run.record["facts"]["header"] = []
    run.write()
    assert found.row("a")["max_steps"] is None


OUTPUTS, KNOWN = Path("/data/outputs"), {"demo/sft", "demo/reward", "demo/ppo", "big", "demo/judge"}


def parents(config, run="demo/ppo", facts=None, stage="ppo"):
    return parent_names(run, parents_of(run, {"stage": stage, "config": config, "facts": facts or {}}, OUTPUTS), KNOWN)


def role(name, path):
    return {"roles": {name: {"model_name_or_path": path}}}


@pytest.mark.parametrize(("output_dir", "path"), [
    ("/data/outputs/demo/ppo", "/data/outputs/demo/sft"), ("/data/outputs/demo/ppo", "/data/outputs/demo/sft/model"),
    ("/data/outputs/demo/ppo", "/data/outputs/demo/sft/checkpoints/step-00000010"),
    ("outputs/demo/ppo", "outputs/demo/sft"), ("outputs/demo/ppo", "./outputs/demo/sft/"),
    ("/old/place/demo/ppo", "/old/place/demo/sft"), ("demo/ppo", "demo/sft"),
    ("elsewhere", "/data/outputs/demo/sft"), (None, "/data/outputs/demo/sft/model_ema")])
def test_a_run_is_found_wherever_it_was_made(output_dir, path):
    assert parents({"output_dir": output_dir, "model": {"model_name_or_path": path}}) == ["demo/sft"]


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "/models/demo/sft", "/data/outputs", "/data/outputs/none",
                                  "/data/outputs/../sft", "outputs/demo/sft"])
def test_other_models_are_named_as_they_are(path):
    assert parents({"output_dir": "/data/outputs/demo/ppo", "model": {"model_name_or_path": path}}) == [path]


def test_all_models_that_a_run_learns_from_are_its_parents():
    named = {"actor": "outputs/demo/sft", "ref": "outputs/demo/sft", "reward": "outputs/demo/reward",
             "teacher": "outputs/big"}
    config = {"output_dir": "outputs/demo/ppo", "model": {"model_name_or_path": None},
              "roles": {name: {"model_name_or_path": path} for name, path in named.items()},
              "reward": {"models": "org/reward", "judge": {"model": "outputs/demo/judge"}}}
    assert parents(config) == ["demo/sft", "demo/reward", "big", "org/reward", "demo/judge"]
    assert parents({"evaluate": {"models": ["start=/data/outputs/demo/sft", "/data/outputs/demo/ppo", "org/m"]}},
                   "demo/eval", stage="evaluate") == ["demo/sft", "demo/ppo", "org/m"]


@pytest.mark.parametrize("sources", ["outputs/big/marks/pairs.jsonl", ["x", "/data/outputs/big/marks/texts.jsonl"],
                                     {"path": "outputs/big/rows/train.jsonl"}, [{"path": "/data/outputs/big/marks"}]])
def test_a_run_whose_files_are_the_data_is_a_parent_and_other_data_is_none(sources):
    config = {"output_dir": "outputs/demo/ppo", "model": {"model_name_or_path": "outputs/demo/sft"}}
    assert parents(config | {"data": {"sources": sources}}) == ["demo/sft", "big"]


def test_of_a_run_that_learnt_from_marks_the_list_says_what_it_holds(tmp_path):
    values = {"mark/before": 0.04, "mark/after": 0.9, "mark/kl": 0.01, "mark/held": 0.75, "time/step": 2.0}
    make_run(tmp_path, "taught", "chat", values=lambda step: values)
    assert by_id(opened(tmp_path))["taught"]["headline"] == [
        {"name": "mark/held", "value": 0.75}, {"name": "mark/kl", "value": 0.01}]


def test_models_that_nobody_named_are_those_that_the_run_says_it_took():
    config = {"output_dir": "/data/outputs/demo/ppo", "train": {}, "model": {}} | role("reward", None)
    assert parents(config) == ["demo/sft", "demo/reward"]  # beside it, as a run takes them
    line = "model: /data/outputs/big; trained: all 136,320 parameters; float32 on cpu"
    assert parents(config, facts={"header": ["data: 3", line]}) == ["big", "demo/reward"]
    assert parents(config, facts={"base_model": "/data/outputs/big", "reward_model": "org/r"}) == ["big", "org/r"]
    assert parents(config | {"reward": {"functions": ["builtin:format"]}}) == ["demo/sft"]
    assert parents(config, run="other/ppo") == [] and parents(config, stage="sft", run="demo/x") == ["demo/reward"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_record_with_the_real_settings_of_any_stage_is_read(tmp_path, stage):
    config = plain(read_settings(stage, ["--output_dir", str(tmp_path / "a")])[0])
    run = make_run(tmp_path, "a", "sft", 2)
    rewrite(run, stage=stage, config=config)
    row = by_id(opened(tmp_path))["a"]
    assert (row["stage"], row["status"], row["error"]) == (stage, "finished", None)


def test_a_run_is_not_its_own_parent():
    assert parents({"model": {"model_name_or_path": "/data/outputs/demo/ppo"}}) == []


def test_the_last_rows_are_whole_ones(tmp_path):
    path = tmp_path / "x"
    path.write_text('{"step": 1}{"step": 2}\n{"step": 3}\n{"step": 4')
    assert run_files.last_rows(path) == [{"step": 3}]
    assert run_files.last_rows(path, 34) == [{"step": 3}]  # begins at {"step": 2}, in the midst of a line
    assert run_files.last_rows(path, 5) == [] and run_files.last_rows(tmp_path / "none") == []


def test_a_folder_s_size_is_that_of_its_own_files(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"0" * 1000)
    folder = tmp_path / "run"
    (folder / "a/b").mkdir(parents=True)
    (folder / "x").write_bytes(b"0" * 10)
    (folder / "a/b/y").write_bytes(b"0" * 5)
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    (folder / "up").symlink_to(tmp_path)
    assert run_files.size_of(folder) == 15 and run_files.size_of(tmp_path / "none") == 0
