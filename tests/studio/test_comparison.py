"""Runs beside each other: settings that differ, the same prompts, the metrics of all."""

from __future__ import annotations

import pytest

from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.run_pages import compare, differing, side_by_side
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.settings_text import flat
from hybrid_rlhf.studio.studio import Refused, Studio
from tests.factories.studio_runs import PROMPTS, append, make_run


def ask(outputs, ids):
    histories = Histories()
    return compare(RunList(Studio(outputs), histories), histories, ids)


def test_two_runs_are_told_beside_each_other(tmp_path):
    make_run(tmp_path, "x/a", "ppo", 10)
    make_run(tmp_path, "x/b", "ppo", 20, settings={"ppo.kl_coef": 0.2, "data.sources": [{"path": "other"}]})
    found = ask(tmp_path, "x/a,x/b")
    assert [row["id"] for row in found["runs"]] == ["x/a", "x/b"] and found["notes"] == []
    assert found["differ"] == [
        {"option": "data.sources", "values": [[{"path": "demo/prompts", "split": "train", "weight": None}],
                                              [{"path": "other"}]]},
        {"option": "train.max_steps", "values": [10, 20]}, {"option": "ppo.kl_coef", "values": [0.1, 0.2]}]
    assert [each["prompt"].split("\n")[1] for each in found["prompts"]] == [f"{text}<|im_end|>" for text in PROMPTS]
    assert [[a["completion"] for a in each["answers"]] for each in found["prompts"]] == [
        ["After 10 steps: B", "After 20 steps: B"]] * 4
    metrics = {each["name"]: each for each in found["metrics"]}
    assert metrics["reward"] == {"name": "reward", "group": "reward",
                                 "meaning": "mean score of the responses, all sources weighed together"}
    assert "eval/reward" in metrics and metrics["time/train"]["group"] == "where a step's time goes"


def test_options_of_one_run_alone_are_no_difference():
    a, b = {"model": {"dtype": "x", "lora": {}}, "ppo": {"kl_coef": 0.1}, "output_dir": "a", "resume": "auto"}, \
        {"model": {"dtype": "y", "lora": {}}, "output_dir": "b", "resume": "never"}
    assert flat(a) == {"model.dtype": "x", "model.lora": {}, "ppo.kl_coef": 0.1, "output_dir": "a", "resume": "auto"}
    assert differing([flat(a), flat(b)]) == [{"option": "model.dtype", "values": ["x", "y"]}]
    assert differing([flat(a), flat(b), {"ppo.kl_coef": 0.3, "model.dtype": "x"}]) == [
        {"option": "model.dtype", "values": ["x", "y", "x"]}, {"option": "ppo.kl_coef", "values": [0.1, None, 0.3]}]


def test_a_prompt_that_most_runs_answer_comes_first():
    def said(prompt, completion, **more):
        return {"prompt": prompt, "completion": completion, **more}

    first, second = [said("p", "1"), said("q", "2")], [said("q", "3")]
    assert side_by_side([first, second, []]) == [{"prompt": "q", "answers": [first[1], second[0], None]},
                                                 {"prompt": "p", "answers": [first[0], None, None]}]
    pair = [said("p", "good", side="chosen"), said("p", "bad", side="rejected")]
    assert side_by_side([pair, pair]) == [{"prompt": "p", "answers": [pair[0]] * 2},
                                          {"prompt": "p", "answers": [pair[1]] * 2}]


def test_eight_runs_are_compared_and_nothing_that_is_no_run(tmp_path):
    for name in "abcdefgh":
        make_run(tmp_path, name, steps=1)
    assert len(ask(tmp_path, "a,b,c,d,e,f,g,h")["runs"]) == 8
    with pytest.raises(Refused):
        ask(tmp_path, "a,../b")


def test_damage_in_one_run_is_a_line_and_the_others_are_shown(tmp_path):
    make_run(tmp_path, "a", "ppo", 5)
    bad = make_run(tmp_path, "b", "ppo", 5)
    (bad.folder / "run.json").write_text("{")
    (bad.folder / "metrics.jsonl").unlink()
    (bad.folder / "metrics.jsonl").mkdir()
    append(bad.folder / "answers.jsonl", [{"step": 9, "prompt": 3}])
    found = ask(tmp_path, "a,b")
    assert [row["status"] for row in found["runs"]] == ["finished", "failed"] and len(found["notes"]) == 2
    assert all(note.startswith("b: ") for note in found["notes"]) and found["differ"] == []
    assert {each["name"] for each in found["metrics"]} >= {"reward", "kl"}
