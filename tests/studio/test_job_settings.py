"""What the page says of a new run becomes data in a file of settings, below the outputs and nowhere else."""

from __future__ import annotations

import json
import math

import pytest
import yaml

from hybrid_rlhf import cli
from hybrid_rlhf.studio.job_settings import evaluation, new_folder, own_settings, settings_text
from hybrid_rlhf.studio.studio import Refused, Studio
from tests.factories.studio_runs import make_run


@pytest.mark.parametrize("run", ["a", "demo/ppo", "a/b/c/d", "A_1", "0.5-lr", "_x", "x" * 100, "a.b", "model"])
def test_names_of_new_runs(tmp_path, run):
    assert new_folder(Studio(tmp_path), run) == tmp_path.joinpath(*run.split("/"))


@pytest.mark.parametrize("run", [
    "", None, 3, ["a"], "/a", "a/", "a//b", ".", "..", "../a", "a/../b", ".studio", ".studio/jobs/a", "a/.b", "-a",
    "a/-b", "a b", "a\n", "a\0", "é", "a\\b", "a:b", "~", "~root", "a/b/c/d/e", "x" * 101, "exports",
    "exports/a", "EXPORTS/a"])
def test_what_is_no_name_of_a_run(tmp_path, run):
    with pytest.raises(Refused) as refusal:
        new_folder(Studio(tmp_path), run)
    assert refusal.value.status == 400 and refusal.value.option == "run" and "\n" not in str(refusal.value)


@pytest.mark.parametrize("run, why", [
    ("demo", "already"), ("demo/ppo", "already"), ("demo/ppo/inner", "demo/ppo is a run"), ("file", "already"),
    ("file/a", "no folder"), ("link/a", "no folder"), ("broken", "already")])
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


STRANGE = ["", " ", "a\nb: c", "it's \"quoted\"", "!!python/object/apply:os.system ['true']", "&a *a", "- x", "{a: b}",
           "# no comment", "null", "none", "yes", "1e-5", "0x10", "2020-01-01", "%YAML", "---", "=", "<<", "~/x",
           "\x00\x1b", "\u2028\u0085\ufeff", "😀", "\ud800", "a: |\n  b", "\t", "@", "`", "?", ": ", "é" * 5000]


@pytest.mark.parametrize("value", [
    *STRANGE, *([text] for text in STRANGE[:8]), None, True, 3, -0.5, 1e-5, math.inf, [], {}, 10**30,
    [[1], {"a.b": ["c"]}], {"name.with.dots": 1, "": 2, "a\nb": [None]}])
def test_a_value_arrives_as_it_is(tmp_path, value):
    text = settings_text({"data.sources": value, "reward.options.f.k": value, "top": value}, tmp_path)
    assert text.isascii()
    assert yaml.safe_load(text) == {"data": {"sources": value}, "reward": {"options": {"f": {"k": value}}},
                                    "top": value, "output_dir": str(tmp_path)}


def test_text_that_looks_like_a_number_is_text_to_the_launcher_too(tmp_path):
    """Whose reader of YAML takes 1e-5 for a number where it stands without quotes."""
    (tmp_path / "a.yaml").write_text(settings_text(
        {"data.sources": ["1e-5", ".5"], "model.tokenizer_name_or_path": "1E5", "train.learning_rate": 1e-5}, None))
    config, _ = cli.read_settings("sft", ["--config", str(tmp_path / "a.yaml")])
    assert [source.path for source in config.data.sources] == ["1e-5", ".5"]
    assert (config.model.tokenizer_name_or_path, config.train.learning_rate) == ("1E5", 1e-5)


@pytest.mark.parametrize("name", ["no.such.option", "", ".", "a..b", "!!python/name:os.system", "a\nb", "{", "data."])
def test_an_option_that_there_is_not_is_left_to_the_launcher(name):
    found = yaml.safe_load(settings_text({name: 1}, None))
    for part in name.split("."):
        found = found[part]
    assert found == 1


@pytest.mark.parametrize("settings", [
    {"a": 1, "a.b": 2}, {"a.b": 1, "a": {"c": 2}}, {"a": {"b": 1}, "a.b": 2}, {"a.b": 1, "a.b.c": 2},
    {"a": [], "a.0": 1}])
def test_two_values_of_one_option_are_refused(settings):
    with pytest.raises(Refused, match="two things") as refusal:
        settings_text(settings, None)
    assert refusal.value.option in settings


def test_what_is_no_mapping_or_too_deep_is_refused(tmp_path):
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for settings in (None, [], "a: b", 3, {"a": deep}):
        with pytest.raises(Refused):
            settings_text(settings, None)
    for given in ("outputs/other", "/etc", 3, ["x"]):
        with pytest.raises(Refused) as refusal:
            settings_text({"output_dir": given}, tmp_path / "a")
        assert refusal.value.option == "output_dir"
    assert yaml.safe_load(settings_text({"output_dir": str(tmp_path / "a")}, tmp_path / "a")) == {
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
    for name in ("a", "b", "c=d"):
        make_run(tmp_path, name)
    (tmp_path / "b/run.json").write_text(json.dumps({"config": {"reward": [1]}, "facts": 3}))
    assert evaluation(Studio(tmp_path), ["a", "b", "c=d"], {}) == {
        "evaluate.models": [f"a={tmp_path}/a", f"b={tmp_path}/b", f"c_d={tmp_path}/c=d"]}
    for runs in (["a"], ["a", "a"], ["a"] * 9, "ab", None, ["a", 3], ["a", "../a"]):
        with pytest.raises(Refused):
            evaluation(Studio(tmp_path), runs, {})
