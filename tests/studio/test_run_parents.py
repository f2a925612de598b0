"""Which runs a run was made from, however its settings name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rlhf.studio.runs import parent_names, parents_of

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


def test_models_that_nobody_named_are_those_that_the_run_says_it_took():
    config = {"output_dir": "/data/outputs/demo/ppo", "train": {}, "model": {}} | role("reward", None)
    assert parents(config) == ["demo/sft", "demo/reward"]  # beside it, as a run takes them
    line = "model: /data/outputs/big; trained: all 136,320 parameters; float32 on cpu"
    assert parents(config, facts={"header": ["data: 3", line]}) == ["big", "demo/reward"]
    assert parents(config, facts={"base_model": "/data/outputs/big", "reward_model": "org/r"}) == ["big", "org/r"]
    assert parents(config | {"reward": {"functions": ["builtin:format"]}}) == ["demo/sft"]
    assert parents(config, run="other/ppo") == [] and parents(config, stage="sft", run="demo/x") == ["demo/reward"]


def test_a_run_is_not_its_own_parent():
    assert parents({"model": {"model_name_or_path": "/data/outputs/demo/ppo"}}) == []
