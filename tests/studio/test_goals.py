"""A new run from the page: every goal's answers make settings that the launcher takes, can look at, and trains by."""

from __future__ import annotations

import json

import pytest
import yaml

from hybrid_rlhf import cli
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.rewards.builtin import BUILTINS
from hybrid_rlhf.studio import preflight
from hybrid_rlhf.studio.goals import STUDIO_GOALS
from hybrid_rlhf.studio.preflight_answers import plain
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.training.registry import STAGES
from tests.factories.asked_new_run import ASKS, answers, post, rows_of
from tests.factories.direct_look import DirectLook

PAIRS = [(name, stage) for name, goal in STUDIO_GOALS.items() for stage in goal.stages]


def test_the_goals_name_what_there_is(client):
    found = client.get("/api/goals").json()
    assert [goal["id"] for goal in found["goals"]] == list(STUDIO_GOALS)
    assert {row["name"] for row in found["builtin_rewards"]} == {*BUILTINS}
    offered = {stage for goal in found["goals"] for stage in goal["stages"]}
    assert {*STAGES} - offered == {"evaluate", "conditional_sft", "process_grpo"}
    assert found["cards"][:2] == ["cpu", "8gb"] and found["card"] == "cpu"
    assert all({*goal["asks"]} <= {*ASKS} and goal["rows"] and goal["help"] for goal in found["goals"])


def test_a_card_is_asked_for_once_where_there_may_be_one(client, place, tmp_path, monkeypatch):
    asked = []

    class Card:
        def ask(self, kind, _asked):
            asked.append(kind)
            if len(asked) == 1:
                raise Refused(503, "it ended")
            return {"card": "24gb"}

        def close(self):
            asked.append("close")

    monkeypatch.setattr(preflight, "_CARD_FILES", (str(tmp_path),))
    monkeypatch.setattr(preflight, "Look", Card)
    goals = preflight.routes(Studio(place / "outputs"), DirectLook())[0].handle
    assert goals({}, {})["card"] == "cpu"
    assert [goals({}, {})["card"] for _ in range(2)] == ["24gb"] * 2
    assert asked == ["card", "close"] * 2  # whatever holds the card ends at once


@pytest.mark.parametrize(("goal", "stage"), PAIRS)
def test_a_goals_answers_are_settings_that_the_launcher_takes(client, place, tmp_path, goal, stage):
    chosen = answers(place, goal) | {"seed": 3}
    found = post(client, "settings", stage=stage, settings=chosen, card="cpu", run=f"{goal}/{stage}")
    assert found["error"] is None
    folder = str(place / "outputs" / goal / stage)
    assert found["given"] == chosen | {"output_dir": folder, "model.lora.r": 16, "engine.micro_batch_tokens": 1024}
    assert found["command"] == f"hybrid-rlhf --stage {stage} --config {stage}.yaml" and found["file"] == f"{stage}.yaml"
    (tmp_path / "a.yaml").write_text(found["yaml"])
    config, _ = cli.read_settings(stage, ["--config", str(tmp_path / "a.yaml")])
    for name, value in found["settings"].items():
        assert plain(value_of(config, name)) == value, name
    for name, value in found["given"].items():
        assert found["settings"][name] == value, name
    read = yaml.safe_load(found["yaml"])
    assert read["model"]["model_name_or_path"] == str(place / "base") and read["data"]["sources"] == chosen[
        "data.sources"]


@pytest.mark.parametrize("goal", STUDIO_GOALS)
def test_a_goals_data_its_examples_and_its_memory_can_be_looked_at(client, place, goal):
    stage, chosen = STUDIO_GOALS[goal].stages[0], answers(place, goal)
    data = post(client, "data", path=chosen["data.sources"][0], stage=stage)
    assert (data["fits"], data["rows"], len(data["first"])) == (True, 30, 3) and json.loads(data["first"][0])
    found = post(client, "preview", stage=stage, settings=chosen)
    assert sum(row["rows"] for row in found["counts"] if row["name"].endswith("read")) == 30 * (
        3 if goal == "three_stages" else 1)
    text = "".join(part["text"] for part in found["examples"][0]["parts"])
    assert ("+ 1" if goal == "function" else "say ") in text and "<|im_start|>" in text
    trained = [part["is_trained"] for example in found["examples"] for part in example["parts"]]
    assert any(trained) == (rows_of(goal) in ("sft", "reward"))
    plan = post(client, "plan", stage=stage, settings=chosen, memory=2**30)
    assert plan["fits"] and plan["available"] == 2**30 and plan["verdict"].find("fits: needs") >= 0
    peak = max(phase["bytes"] for phase in plan["phases"])
    assert peak < 2**30 and sum(line["bytes"] for line in plan["lines"]) >= peak
    assert all(time["seconds"] >= 0 for time in plan["times"]) and plan["time_note"]


def test_a_preview_marks_what_is_trained_and_says_why_rows_are_dropped(client, place, tmp_path):
    rows = [{"prompt": "say red", "chosen": "red", "rejected": "no"},
            {"prompt": "say x", "chosen": "same", "rejected": "same"}, *(
                {"prompt": f"say {word}", "chosen": f"{word}\x1b[31m", "rejected": "no"} for word in "abc")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = post(client, "preview", stage="dpo", settings={
        "data.sources": str(path), "model.model_name_or_path": str(place / "base"), "data.eval_fraction": 0.0})
    assert {row["name"]: row["rows"] for row in found["counts"]} == {
        "rows read": 5, "to train on": 4, "held out": 0}
    assert found["dropped"] == [{"why": "the two answers are the same", "rows": 1}]
    assert len(found["examples"]) == 6  # both sides of three pairs
    first = [part for example in found["examples"] for part in example["parts"] if part["is_trained"]]
    assert "red<|im_end|>" in [part["text"] for part in first]
    assert not any("\x1b" in part["text"] for part in first)


def test_a_column_that_a_built_in_reward_needs_is_missed_before_the_run(client, place):
    chosen = answers(place, "function") | {"data.sources": [str(place / "ppo.jsonl")]}
    found = post(client, "preview", 400, stage="grpo", settings=chosen)
    assert found["option"] == "reward.functions" and "numeric_match needs a column answer" in found["error"]
    assert post(client, "preview", stage="grpo", settings=chosen | {"reward.functions": ["builtin:repetition_penalty"]})


def test_a_plan_that_does_not_fit_says_what_would(client, place):
    chosen = answers(place, "imitate") | {"train.per_device_train_batch_size": 64, "data.max_length": 200}
    found = post(client, "plan", stage="sft", settings=chosen, memory=100 * 2**20)
    assert not found["fits"] and found["verdict"].startswith("short by ") and "try --engine" in found["verdict"]
    assert found["changes"][0]["option"] == "engine.micro_batch_tokens"
    better = chosen | {change["option"]: change["value"] for change in found["changes"]}
    assert post(client, "plan", stage="sft", settings=better, memory=100 * 2**20)["fits"]
    elsewhere = post(client, "plan", stage="sft", settings=chosen, card="24gb")
    assert elsewhere["fits"] and elsewhere["available"] == 24 * 2**30 * 97 // 100
    assert elsewhere["times"] and "published figures" in elsewhere["time_note"]  # of another card than this machine's


ONE_STEP = {"train.max_steps": 1, "train.per_device_train_batch_size": 2, "data.max_prompt_length": 64}
SHORT = {
    **{goal: ONE_STEP | {f"{section}.sampling.max_new_tokens": 4} for goal, section in (
        ("function", "ppo"), ("model", "ppo"), ("judge", "ppo"), ("distil", "distill"))},
    "three_stages": {"ppo.sampling.max_new_tokens": 4, "data.max_prompt_length": 64, **{
        f"stages.{stage}.max_steps": 1 for stage in ("sft", "reward", "ppo")}}}
SHORT["judge"] |= {"reward.judge.score": "probability"}  # a model that has learned nothing writes no verdict


@pytest.mark.slow
@pytest.mark.parametrize("goal", STUDIO_GOALS)
def test_a_goals_file_trains(client, place, tmp_path, goal):
    stage = STUDIO_GOALS[goal].stages[0]
    chosen = answers(place, goal) | SHORT.get(goal, {"train.max_steps": 1, "train.per_device_train_batch_size": 2})
    found = post(client, "settings", stage=stage, settings=chosen, run=f"{goal}/trained")
    assert found["error"] is None
    (tmp_path / found["file"]).write_text(found["yaml"])
    assert cli.main(["--stage", stage, "--config", str(tmp_path / found["file"])]) == 0
    last = "ppo" if stage == "all" else ""
    assert json.loads((place / "outputs" / goal / "trained" / last / "run.json").read_text())["status"] == "finished"
