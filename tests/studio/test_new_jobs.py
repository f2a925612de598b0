"""New jobs: settings become data in a file below the outputs, and those of others name their code before they run."""

from __future__ import annotations

import json
import math
import os
import subprocess

import pytest
import yaml

from hybrid_rlhf import cli
from hybrid_rlhf.studio.job import Job
from hybrid_rlhf.studio.jobs import LAUNCHER
from hybrid_rlhf.studio.new_jobs import _is_ending, evaluation, named_code, new_folder, own_settings, run_settings
from hybrid_rlhf.studio.studio import Refused, Studio
from tests.factories.studio_jobs import queue_client, use_quick_launcher
from tests.factories.studio_runs import make_run


@pytest.mark.parametrize("run", ["a", "demo/ppo", "a/b/c/d", "A_1", "0.5-lr", "_x", "x" * 100, "a.b", "model"])
def test_names_of_new_runs(tmp_path, run):
    assert new_folder(Studio(tmp_path), run) == tmp_path.joinpath(*run.split("/"))


@pytest.mark.parametrize("run", [
    "", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", ".studio", "a/.b", "-a", "a b", "a\n", "a\0", "a\\b",
    "~", "a/b/c/d/e", "x" * 101, "exports", "EXPORTS/a"])
def test_what_is_no_name_of_a_run(tmp_path, run):
    with pytest.raises(Refused) as refusal:
        new_folder(Studio(tmp_path), run)
    assert refusal.value.status == 400 and refusal.value.option == "run" and "\n" not in str(refusal.value)


@pytest.mark.parametrize("run, why", [
    ("demo", "already"), ("demo/ppo", "already"), ("demo/ppo/inner", "demo/ppo is a run"), ("file", "already"),
    ("file/a", "not a folder"), ("link/a", "not a folder"), ("broken", "already")])
def test_a_new_run_is_where_nothing_is(tmp_path, run, why):
    outputs, other = tmp_path / "outputs", tmp_path / "other"
    other.mkdir()
    make_run(outputs, "demo/ppo", "ppo", steps=0)
    (outputs / "file").write_text("")
    (outputs / "link").symlink_to(other)
    (outputs / "broken").symlink_to("nowhere")
    with pytest.raises(Refused, match=why) as refusal:
        new_folder(Studio(outputs), run)
    assert refusal.value.status == 409


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A client over demo/sft and demo/ppo, which was made from it."""
    use_quick_launcher(monkeypatch, tmp_path)
    outputs = (tmp_path / "outputs").resolve()
    make_run(outputs, "demo/sft", "sft", steps=2)
    make_run(outputs, "demo/ppo", "ppo", steps=2, parents=["demo/sft"])
    with queue_client(outputs) as client:
        yield client, outputs


def test_a_run_gets_another_name_where_nothing_is(kept):
    client, outputs = kept
    assert client.post("/api/run/move", json={"id": "demo/ppo", "name": "best/one"}).json() == {}
    assert (outputs / "best/one/model").is_dir() and not (outputs / "demo/ppo").exists()
    for name in ("best/one", "../out", ".hidden", "best/one/inner", "demo/sft/inner", "exports/x", ""):
        assert client.post("/api/run/move", json={"id": "demo/sft", "name": name}).status_code in (400, 409), name
    assert client.post("/api/run/move", json={"id": "../x", "name": "y"}).status_code == 404
    assert (outputs / "demo/sft/model").is_dir()


def test_a_run_is_deleted_and_never_while_it_runs_or_has_another_inside(kept):
    client, outputs = kept
    (outputs / ".studio/deleted/left").mkdir(parents=True)  # by a studio that was killed
    assert client.post("/api/run/move", json={"id": "demo/sft"}).json() == {}
    assert not (outputs / "demo/sft").exists() and (outputs / "demo/ppo/model").is_dir()
    assert not (outputs / ".studio/deleted").exists()
    make_run(outputs, "demo/ppo/inner", "sft", steps=1)
    (outputs / "plain").mkdir()
    (outputs / "link").symlink_to(outputs / "demo/ppo")
    running = make_run(outputs, "live", "sft", 2, "running")
    for run, status in (("demo/ppo", 409), ("plain", 404), ("live", 409), ("demo", 404), ("..", 404), (".studio", 404),
                        ("link", 404)):
        assert client.post("/api/run/move", json={"id": run}).status_code == status, run
        assert client.post("/api/run/move", json={"id": run, "name": "z"}).status_code == status, run
    running.die()


@pytest.mark.parametrize("value", [
    "a\nb: c", "it's \"quoted\"", "!!python/object/apply:os.system ['true']", "# no comment", "null", "1e-5", "😀",
    None, True, 3, -0.5, 1e-5, math.inf, [], {}, [[1], {"a.b": ["c"]}], {"name.with.dots": 1, "a\nb": [None]}])
def test_a_value_arrives_as_it_is(tmp_path, value):
    text = run_settings({"data.sources": value, "reward.options.f.k": value, "top": value}, tmp_path)
    assert text.isascii()
    assert yaml.safe_load(text) == {"data": {"sources": value}, "reward": {"options": {"f": {"k": value}}},
                                    "top": value, "output_dir": str(tmp_path)}


def test_text_that_looks_like_a_number_is_text_to_the_launcher_too(tmp_path):
    """Whose reader of YAML takes 1e-5 for a number where it stands without quotes."""
    (tmp_path / "a.yaml").write_text(run_settings(
        {"data.sources": ["1e-5", ".5"], "model.tokenizer_name_or_path": "1E5", "train.learning_rate": 1e-5}, None))
    config, _ = cli.read_settings("sft", ["--config", str(tmp_path / "a.yaml")])
    assert [source.path for source in config.data.sources] == ["1e-5", ".5"]
    assert (config.model.tokenizer_name_or_path, config.train.learning_rate) == ("1E5", 1e-5)


def test_settings_do_not_move_the_run(tmp_path):
    for folder in ("outputs/other", "/etc"):
        with pytest.raises(Refused) as refusal:
            run_settings({"output_dir": folder}, tmp_path / "a")
        assert refusal.value.option == "output_dir"
    assert yaml.safe_load(run_settings({"output_dir": str(tmp_path / "a")}, tmp_path / "a")) == {
        "output_dir": str(tmp_path / "a")}


def test_a_resumed_run_has_its_own_settings(tmp_path):
    run = make_run(tmp_path, "a", "sft", status="stopped")
    stage, text = own_settings(run.folder)
    assert stage == "sft" and yaml.safe_load(text) == run.record["config"]
    (run.folder / "config.yaml").write_text("")
    with pytest.raises(Refused, match="no readable"):
        own_settings(run.folder)


def test_an_evaluation_takes_what_it_is_not_given_from_the_first_run_with_rewards(tmp_path):
    make_run(tmp_path, "sft")
    run = make_run(tmp_path, "demo/ppo", "ppo", parents=["sft", "reward"], settings={"ppo.sampling.max_new_tokens": 33})
    studio = Studio(tmp_path)
    found = evaluation(studio, ["sft", "demo/ppo"], {})
    config = run.record["config"]
    assert found == {
        "evaluate.models": [f"sft={tmp_path}/sft", f"demo/ppo={tmp_path}/demo/ppo"],
        "data.sources": config["data"]["sources"], "reward": config["reward"], "environment": config["environment"],
        "data.eval_fraction": config["data"]["eval_fraction"],
        "roles.reward.model_name_or_path": "reward", "evaluate.sampling.max_new_tokens": 33}
    given = {"data.sources": "mine", "reward.functions": "builtin:format", "evaluate.sampling.max_new_tokens": 5}
    assert evaluation(studio, ["sft", "demo/ppo"], given) == {"evaluate.models": found["evaluate.models"], **given}


@pytest.mark.parametrize("shares, own, expected", [
    ((0.05, 0.02), [], {"data.eval_fraction": 0.02}),  # what both held out
    ((0.05, 0.0), [], {"evaluate.rows": "all"}),  # nothing is held out of all, and nothing is called so
    ((0.0, 0.05), [{"path": "eval.jsonl"}], {"data.sources": [{"path": "eval.jsonl"}], "evaluate.rows": "all"})])
def test_an_evaluation_asks_what_no_run_was_trained_on(tmp_path, shares, own, expected):
    for name, share in zip(("a", "b"), shares, strict=True):
        make_run(tmp_path, name, "ppo", settings={"data.eval_fraction": share, "data.eval_sources": own})
    found = evaluation(Studio(tmp_path), ["a", "b"], {})
    assert {name: found.get(name) for name in expected} == expected
    assert ("data.eval_fraction" in found) == ("data.eval_fraction" in expected)


def test_an_evaluation_of_runs_without_rewards_is_left_to_the_launcher(tmp_path):
    for name in ("a", "c=d"):
        make_run(tmp_path, name)
    assert evaluation(Studio(tmp_path), ["a", "c=d"], {}) == {
        "evaluate.models": [f"a={tmp_path}/a", f"c_d={tmp_path}/c=d"]}
    with pytest.raises(Refused):
        evaluation(Studio(tmp_path), ["a", "../a"], {})


BEGAN = "2026-11-26T10:00:00+00:00"


@pytest.mark.parametrize(("status", "finished", "state", "is_ending"), [
    ("running", None, "running", False),
    ("stopped", None, "running", True),  # it writes its model
    ("stopped", "2026-11-26T10:05:00+00:00", "running", True),
    ("stopped", "2026-11-26T09:55:00+00:00", "running", False),  # by an earlier process; this one has yet to begin
    ("failed", None, "running", False),
    ("stopped", None, "queued", False)])
def test_a_run_is_ending_once_its_record_says_so(tmp_path, status, finished, state, is_ending):
    (tmp_path / "run.json").write_text(json.dumps({"status": status, "finished": finished}))
    assert _is_ending(Job("1", {}, state, started=BEGAN), tmp_path) == is_ending


@pytest.mark.parametrize("settings, named", [
    ({"reward": {"functions": ["builtin:format", "builtin:numeric_match"]},
      "environment": {"tools": ["builtin:calculator"]}}, []),
    ({"reward": {"functions": ["builtin:format", "/x/f.py:s"]}}, ["reward.functions /x/f.py:s"]),
    ({"reward": {"functions": "f.py:s"}}, ["reward.functions f.py:s"]),
    ({"reward.functions": ["f.py:s"]}, ["reward.functions f.py:s"]),
    ({"environment": {"factory": {"game": "g.py:Game"}}}, ["environment.factory.game g.py:Game"]),
    ({"environment": {"tools": ["t.py:search"]}}, ["environment.tools t.py:search"]),
    ({"reward": {"judge": {"url": "http://x", "model": None}, "url": "http://y"}},
     ["reward.judge.url http://x", "reward.url http://y"]),
    ({"roles": {"reward": {}}, "model": {"trust_remote_code": True, "trust_pickled_weights": False}},
     ["model.trust_remote_code"]),
    ({"data": {"sources": [{"path": "x", "trust_remote_code": True}]}}, ["data.sources.trust_remote_code"]),
    (None, []), ([1], []), ("text", [])])
def test_code_addresses_and_permissions_are_named(settings, named):
    assert named_code(settings) == named


def a_strangers_run(outputs):
    folder = outputs / "theirs"
    folder.mkdir(parents=True)
    settings = {"stage": "sft", "reward": {"functions": ["/x/evil.py:score"]}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "run.json").write_text('{"stage": "sft", "status": "stopped", "config": {}, "metrics": {}, "facts": {}}')
    return folder


def test_a_strangers_run_is_resumed_after_a_word_of_confirmation_only(monkeypatch, tmp_path):
    use_quick_launcher(monkeypatch, tmp_path)
    a_strangers_run(tmp_path / "outputs")
    with queue_client(tmp_path / "outputs", is_open=False) as client:
        answer = client.post("/api/run/resume", json={"id": "theirs"})
        assert (answer.status_code, answer.json()["option"]) == (409, "is_confirmed")
        assert "/x/evil.py:score" in answer.json()["error"]
        assert client.get("/api/jobs").json()["jobs"] == []
        assert client.post("/api/run/resume", json={"id": "theirs", "is_confirmed": "yes"}).status_code == 409
        assert client.post("/api/run/resume", json={"id": "theirs", "is_confirmed": True}).status_code == 200


def test_a_replay_and_a_fork_become_commands_on_the_run(monkeypatch, tmp_path):
    use_quick_launcher(monkeypatch, tmp_path)
    outputs = (tmp_path / "outputs").resolve()
    make_run(outputs, "demo/ppo", "ppo", steps=2, settings={"reward.functions": ["f.py:s"]})

    def words(number: str) -> list[str]:
        return json.loads((outputs / ".studio/jobs" / number / "job.json").read_text())["words"][2:]

    with queue_client(outputs, is_open=False) as client:
        def ask(**body):
            return client.post("/api/jobs", json={"kind": "replay", "run": "demo/ppo", "is_confirmed": True, **body})

        assert ask(reward="--fork", is_confirmed=False).json()["option"] == "is_confirmed"
        assert ask(reward="r.py:aim").json()["run"] == "demo/ppo"
        assert words("000001") == ["replay", f"{outputs}/demo/ppo", "--reward=r.py:aim"]
        row = ask(step=3, settings="ppo.kl_coef 0.1 --seed 2").json()
        assert (row["kind"], row["stage"], row["run"]) == ("train", "ppo", "demo/ppo_fork_3")
        assert words("000002") == ["replay", f"{outputs}/demo/ppo", "--fork", "3", "--output_dir",
                                   f"{outputs}/demo/ppo_fork_3", "--ppo.kl_coef=0.1", "--seed=2"]
        assert ask(step=3, settings="ppo.kl_coef 0.2").status_code == 409  # it waits already
        for settings in ("ppo.kl_coef", "output_dir /x", "--against y", "a b"):
            assert ask(step=4, settings=settings).json()["option"] == "settings", settings


def test_a_module_in_the_current_folder_is_not_taken_for_the_library(tmp_path):
    (tmp_path / "hybrid_rlhf").mkdir()
    (tmp_path / "hybrid_rlhf" / "__init__.py").write_text("raise SystemExit('stranger')")
    (tmp_path / "hybrid_rlhf" / "__main__.py").write_text("")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = subprocess.run([*LAUNCHER, "--version"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root},
                           capture_output=True, text=True)
    assert found.returncode == 0 and "stranger" not in found.stdout + found.stderr
