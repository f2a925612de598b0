"""The command line: help, the settings it prints, who wins, the embedded demo, previews."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re

import pytest
import yaml

from hybrid_rlhf.cli import SWITCHES, main
from hybrid_rlhf.core.config import UserError, parse
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.training import all_stages, step1_sft, step3_ppo
from hybrid_rlhf.training.registry import STAGES
from hybrid_rlhf.training.unread_options import of_stage
from tests.factories.tiny import save_tiny


def config_class(stage: str) -> type:
    return importlib.import_module(STAGES[stage].module).Config


def leaves(config: object, prefix: str = "") -> dict[str, object]:
    """{dotted name: value} of nested dataclasses."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        found |= leaves(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def printed(capsys, *argv: str) -> str:
    """What the command line prints, where it ends by itself with 0."""
    with pytest.raises(SystemExit) as stop:
        main(list(argv))
    assert stop.value.code == 0
    return capsys.readouterr().out


def settings(stage: str, *argv: str):
    return parse(config_class(stage), [*STAGES[stage].preset, *argv], prog="x",
                 extra=SWITCHES)[0]


def write(path, value: object) -> str:
    path.write_text(yaml.safe_dump(value))
    return str(path)


@pytest.mark.parametrize("stage", [s for s in STAGES if s != "all"])
def test_help_explains_every_option_and_gives_its_default(stage, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    text = printed(capsys, "--stage", stage, "--help").split("\noptions:\n")[1]
    entries = {}
    for entry in re.split(r"\n  (?=--)", text):
        entries[entry.split()[0].strip(",")] = " ".join(entry.split())
    for name, value in leaves(config_class(stage)()).items():
        if f"{name}.".startswith(tuple(f"{option}." for option in of_stage(stage))):
            assert f"--{name}" not in entries, f"no option of {stage}: {name}"
            continue
        default = yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("...").strip()
        entry = entries[f"--{name}"]
        assert re.search(r"[a-z]{2,}.*[.)] \(type: ", entry), f"{name} is not explained: {entry}"
        assert entry.endswith(f"default: {default})") or f"default: {default})" in entry, (entry, default)


def test_help_of_all_stages_has_the_schedule_of_each(capsys) -> None:
    text = printed(capsys, "--stage", "all", "--help")
    for name in ("--stages.sft.max_steps", "--stages.reward.learning_rate", "--stages.ppo.max_steps", "--ppo.kl_coef",
                 "--roles.actor.learning_rate", "--compare.longer_sft", "--run_stages"):
        assert name in text


def test_demo_is_all_stages_on_one_thread_unless_told_otherwise(monkeypatch, capsys) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    text = printed(capsys, "demo", "--seed", "7", "--print_config")
    assert yaml.safe_load(text) == yaml.safe_load(printed(capsys, "--stage", "all", "--seed", "7", "--print_config"))
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    printed(capsys, "demo", "--print_config")
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_launcher_without_a_stage_lists_the_stages(argv, capsys) -> None:
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", out, re.MULTILINE) for name in STAGES)


def test_the_version_is_told_and_is_the_package_s(capsys) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"hybrid-rlhf \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("stage", STAGES)
def test_printed_settings_given_back_are_the_same_settings(stage, capsys, tmp_path) -> None:
    changes = ["--seed", "7", "--data.sources=[{path: a.jsonl, weight: 2, columns: {prompt: q}}]",
               "--data.split", "null"]
    changes += [] if "model.freeze" in of_stage(stage) else ["--model.freeze=[embed, 'layers\\.0']"]
    first = printed(capsys, "--stage", stage, *changes, "--print_config")
    (tmp_path / "printed.yaml").write_text(first)
    assert printed(capsys, "--stage", stage, "--config", f"{tmp_path}/printed.yaml", "--print_config") == first
    assert settings(stage, "--config", f"{tmp_path}/printed.yaml") == settings(stage, *changes)


def test_an_offline_variant_s_name_sets_its_loss_and_its_folder_and_nothing_else() -> None:
    for name in ("ipo", "hinge", "kto", "orpo", "simpo"):
        config, plain = settings(name), settings("dpo")
        assert (config.output_dir, config.dpo.loss_type) == (f"outputs/{name}", name)
        assert config.stage == name
        assert dataclasses.replace(config, stage="dpo", output_dir="outputs/dpo", dpo=plain.dpo) == plain
    assert settings("ipo", "--output_dir", "elsewhere").output_dir == "elsewhere"
    assert settings("conditional_sft").stage == "conditional_sft"


def test_the_command_line_wins_over_yaml_and_yaml_over_the_defaults(tmp_path) -> None:
    first = write(tmp_path / "a.yaml", {"seed": 1, "train": {"max_steps": 5, "learning_rate": 0.5}})
    second = write(tmp_path / "b.yaml", {"train": {"learning_rate": 0.25}})
    config = settings("sft", "--config", first)
    assert (config.seed, config.train.max_steps, config.train.learning_rate) == (1, 5, 0.5)
    assert config.train.weight_decay == step1_sft.Config().train.weight_decay  # untouched beside its neighbours
    assert settings("sft", "--config", first, "--train.max_steps", "6").train.max_steps == 6
    assert settings("sft", "--config", first, "--config", second).train.learning_rate == 0.25
    assert settings("sft", "--config", first, "--config", second).train.max_steps == 5
    assert settings("sft", "--train.max_steps", "6", "--train.max_steps", "7").train.max_steps == 7


def test_numbers_lists_and_mappings_are_read_as_what_they_are(tmp_path) -> None:
    config = settings("sft", "--train.learning_rate", "1e-3", "--data.split=[1, 2, 3]",
                      "--data.sources=[{path: a.jsonl, weight: 1, stages: [sft]}, {path: b.csv, weight: 0.5}]",
                      "--model.lora.r=4", "--model.lora.target_modules=[q_proj, v_proj]", "--data.packing", "true")
    assert config.train.learning_rate == 1e-3
    assert config.data.split == [1.0, 2.0, 3.0]
    assert [(s.path, s.stages, s.weight) for s in config.data.sources] == [("a.jsonl", ["sft"], 1.0),
                                                                           ("b.csv", [], 0.5)]
    assert config.model.lora.target_modules == ["q_proj", "v_proj"]
    assert config.data.packing is True
    from_file = write(tmp_path / "c.yaml", {"data": {"sources": [{"path": "c.jsonl", "columns": {"prompt": "q"}}]}})
    assert settings("sft", "--config", from_file).data.sources[0].columns == {"prompt": "q"}


def test_a_list_replaces_the_one_before_it_whole(tmp_path) -> None:
    """Merged item by item, the new source would be read with the old one's columns, or for its stages only."""
    old = write(tmp_path / "old.yaml", {"data": {"sources": [{"path": "c.jsonl", "columns": {"prompt": "q"}}]}})
    new = write(tmp_path / "new.yaml", {"data": {"sources": [{"path": "d.jsonl"}]}})
    for later in (["--data.sources=[{path: d.jsonl}]"], ["--data.sources", "[{path: d.jsonl}]"], ["--config", new],
                  [f"--config={new}"]):
        replaced = settings("sft", "--config", old, *later).data.sources
        assert [(s.path, s.columns) for s in replaced] == [("d.jsonl", {})], later
    added = settings("sft", "--config", old, "--data.sources+={path: d.jsonl}").data.sources
    assert [(s.path, s.columns) for s in added] == [("c.jsonl", {"prompt": "q"}), ("d.jsonl", {})]


def test_settings_cannot_be_changed_once_they_are_read() -> None:
    config = settings("ppo")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.ppo.sampling.top_p = 0.5


def test_settings_of_another_stage_are_refused(tmp_path, capsys) -> None:
    path = write(tmp_path / "sft.yaml", {"stage": "sft", "seed": 1})
    assert main(["--stage", "reward", "--config", path]) == 2
    assert capsys.readouterr().err == ("error: --stage reward, but the settings say stage: sft; give --stage sft, "
                                       "or another file\n")


def test_python_refuses_a_bad_value_as_the_command_line_does() -> None:
    with pytest.raises(UserError, match=r"ppo\.minibatch_size is 99"):
        step3_ppo.Config(train=TrainConfig(per_device_train_batch_size=8),
                         ppo=step3_ppo.PPOConfig(minibatch_size=99, num_ppo_epochs=1, num_minibatches=1))


@pytest.mark.parametrize(("argv", "is_demo"), [
    ([], True), (["--seed", "1"], True), (["--stages.ppo.max_steps", "3"], True), (["--output_dir", "x"], True),
    (["--config", "mine.yaml"], False), (["--config=mine.yaml"], False), (["--model.preset", "tiny"], False),
    (["--data.sources=[{path: a.jsonl}]"], False)])
def test_the_embedded_demo_runs_where_no_config_model_or_data_is_given(argv, is_demo) -> None:
    assert (all_stages.default_config(argv) == str(all_stages.DEMO)) == is_demo


def test_all_stages_without_flags_are_the_demo_and_with_a_config_are_not(capsys, tmp_path, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(all_stages, "run", lambda config, command: seen.append(config))
    for argv in ([], ["--seed", "1", "--stages.sft.max_steps", "3"]):
        assert main(["--stage", "all", *argv]) == 0
        assert "the embedded demo" in capsys.readouterr().err
    rows = tmp_path / "a.jsonl"
    rows.write_text("")
    mine = write(tmp_path / "mine.yaml", {"data": {"sources": [{"path": str(rows)}]}})
    assert main(["--stage", "all", "--config", mine]) == 0
    assert "demo" not in capsys.readouterr().err
    bare, demo, other = seen
    assert demo.model.preset == "demo" and demo.output_dir == "outputs/demo" and demo.compare.checker == "demo"
    assert demo == dataclasses.replace(bare, seed=1, stages=demo.stages)
    assert (demo.seed, demo.stages.sft.max_steps) == (1, 3)  # flags win over the demo's file
    assert [s.path for s in demo.data.sources] == ["demo/demonstrations", "demo/preferences", "demo/prompts"]
    assert other.model.preset is None and [s.path for s in other.data.sources] == [str(rows)]
    assert other.output_dir == "outputs/all" and other.compare.checker is None


@pytest.fixture
def previewed(tmp_path, monkeypatch, capsys):
    """A function: stage and more options -> what --preview prints. Nothing may be written but the cache."""
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    words = ["red", "blue", "green", "cat", "dog"]
    rows = {"sft": [{"prompt": f"say {w}", "completion": w} for w in words],
            "reward": [{"prompt": f"say {w}", "chosen": w, "rejected": "no"} for w in words],
            "ppo": [{"prompt": f"say {w}"} for w in words]}
    for name, table in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in table))
    save_tiny(tmp_path / "base")

    def show(stage: str, *more: str) -> str:
        files = [f"{{path: {n}.jsonl, stages: [{n}]}}" for n in rows]
        argv = ["--stage", stage, "--preview", f"--data.sources=[{', '.join(files)}]", "--data.split", "null",
                "--model.model_name_or_path", "base"]
        assert main([*argv, *more]) == 0
        assert not (tmp_path / "outputs").exists()
        return capsys.readouterr().out

    return show


@pytest.mark.parametrize(("stage", "panels", "trained"), [
    ("sft", 3, "⟦red<|im_end|>⟧"), ("reward", 6, "⟦no<|im_end|>⟧"), ("ppo", 3, "say red")])
def test_preview_prints_three_examples_with_the_trained_tokens_marked(previewed, stage, panels, trained) -> None:
    more = ["--roles.reward.model_name_or_path", "base"] if stage == "ppo" else []
    out = previewed(stage, *more)
    assert len(re.findall(rf"{stage} example \d: ", out)) == panels  # a pair has two sides
    assert {int(n) for n in re.findall(r"example (\d): ", out)} == {1, 2, 3}
    assert trained in out
    assert ("⟦" in out) == (stage != "ppo")


def test_preview_of_all_stages_shows_each(previewed) -> None:
    out = previewed("all")
    assert all(f"{stage} example 3: " in out for stage in ("sft", "reward", "ppo"))


def test_preview_needs_no_trained_predecessor_of_a_model_that_is_given(previewed) -> None:
    assert "reward example 3: " in previewed("reward")


def test_data_that_is_not_there_is_said_before_any_model_is_looked_at(capsys):
    assert main(["--stage", "sft", "--model", "./no_model", "--data.sources", "no_rows.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("error: data.sources: no_rows.jsonl does not exist; give a file")


def test_columns_of_all_data_are_told_where_they_belong(capsys):
    assert main(["--stage", "sft", "--data.columns", "{prompt: a}"]) == 2
    assert capsys.readouterr().err == (
        "error: data.columns is not used by --stage sft; columns belong to a source: --data.sources "
        '"{path: FILE, columns: {prompt: question}}"\n')
