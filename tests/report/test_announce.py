"""What a run says before its first step and after its last: the model, the run, where things are, what comes next."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hybrid_rlhf import cli
from hybrid_rlhf.core.accelerator import device_line
from hybrid_rlhf.core.config import parse
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.models.lora import add_lora
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.training import announce, builders, preferences, step1_sft, step2_reward, step3_ppo, unread_options
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model, tiny_tokenizer

MODULES = {"sft": step1_sft, "reward": step2_reward, "ppo": step3_ppo, "ipo": preferences}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with pairs, prompts and demonstrations in it."""
    rows = {"pairs": {"prompt": "p", "chosen": "c", "rejected": "r"}, "talks": {"messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}}
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(capsys, stage: str, *argv: str, program: str = "/usr/bin/hybrid-rlhf", **facts: str) -> dict[str, str]:
    """What is said after a run of `stage`, by the first word of each line."""
    config = parse(MODULES[stage].Config, [f"--stage={stage}", *argv], prog="test")[0]
    folder = config.output_dir
    record = RunRecord(folder, stage, status="finished", facts={"base_model": "base"} | facts)
    announce.Path(folder).mkdir(parents=True, exist_ok=True)
    record.write()
    capsys.readouterr()
    announce.after(config, program)
    return dict(line.split(": ", 1) for line in capsys.readouterr().err.splitlines())


def settings(line: str) -> object:
    """The settings that a printed command stands for; raises UserError where it is not one."""
    program, *words = shlex.split(line)
    assert program == "hybrid-rlhf"
    name, rest = cli._take_stage(words, "hybrid-rlhf")
    return parse(MODULES[name].Config, rest, prog="test", unused=unread_options.of_stage(name))[0]


def test_after_sft_comes_the_reward_model_on_the_run_s_own_pairs_with_the_same_adapters(place, capsys):
    said = told(capsys, "sft", "--data.sources=[pairs.jsonl, talks.jsonl]", "--output_dir=outputs/sft",
                "--model.lora.r=8", "--model.dtype=bfloat16")
    assert list(said) == ["model", "report", "chat", "next"]
    assert (said["model"], said["report"]) == ("outputs/sft/model", "outputs/sft/report.html")
    assert said["chat"] == "hybrid-rlhf chat --model outputs/sft"
    assert said["next"] == ("hybrid-rlhf --stage reward --data.sources pairs.jsonl --model.lora.r 8 --model.dtype "
                            "bfloat16 --output_dir outputs/reward")
    assert settings(said["next"]).model.lora.r == 8


def test_data_that_does_not_serve_the_next_stage_is_a_name_to_fill_in_and_other_folders_are_named(place, capsys):
    said = told(capsys, "sft", "--data.sources=talks.jsonl", "--output_dir=my runs/first",
                program="/somewhere/train.py")
    assert said["chat"] == "python /somewhere/train.py chat --model 'my runs/first'"
    assert "--data.sources PAIRS.jsonl --model.model_name_or_path 'my runs/first'" in said["next"]
    assert "--output_dir 'my runs/reward'" in said["next"]


def test_after_a_reward_model_comes_ppo_and_the_chat_is_with_the_policy_that_it_started_from(place, capsys):
    told(capsys, "sft", "--data.sources=talks.jsonl", "--output_dir=outputs/sft")
    said = told(capsys, "reward", "--data.sources=pairs.jsonl", "--output_dir=outputs/reward",
                base_model="outputs/sft")
    assert said["chat"] == "hybrid-rlhf chat --model outputs/sft --reward_model outputs/reward"
    assert said["next"] == "hybrid-rlhf --stage ppo --data.sources PROMPTS.jsonl --output_dir outputs/ppo"
    assert settings(said["next"]).output_dir == "outputs/ppo"
    elsewhere = told(capsys, "reward", "--data.sources=pairs.jsonl", "--output_dir=outputs/reward2", base_model="base")
    assert "--model.model_name_or_path base --roles.reward.model_name_or_path outputs/reward2" in elsewhere["next"]


@pytest.mark.parametrize(("sources", "more", "named"), [
    ("[pairs.jsonl, asked.jsonl]", (), "asked.jsonl"),
    ("[pairs.jsonl]", ("--data.split=[2,4,4]",), "pairs.jsonl"),
    ("[{path: pairs.jsonl, stages: [reward, ppo]}]", (), '[{"path": "pairs.jsonl", "stages": ["reward", "ppo"]}]')])
def test_ppo_asks_what_the_reward_model_has_not_learned_from(place, capsys, sources, more, named):
    (place / "asked.jsonl").write_text('{"prompt": "p"}\n')
    said = told(capsys, "reward", f"--data.sources={sources}", "--output_dir=outputs/reward", *more)
    assert f"--data.sources {shlex.quote(named)} " in said["next"]


def test_only_sft_and_the_reward_model_are_followed_by_a_stage():
    assert {name: row.followed_by for name, row in cli.STAGES.items() if row.followed_by} == {
        "sft": "reward", "reward": "ppo"}, "conditional_sft has learned from its scores already"


def test_after_the_last_stage_come_a_chat_beside_its_start_and_the_export(place, capsys):
    for stage, folder in (("sft", "outputs/sft"), ("reward", "outputs/reward")):
        told(capsys, stage, "--data.sources=pairs.jsonl", f"--output_dir={folder}")
    said = told(capsys, "ppo", "--data.sources=pairs.jsonl", "--output_dir=outputs/ppo", base_model="outputs/sft",
                reward_model="outputs/reward")
    assert said["chat"] == ("hybrid-rlhf chat --model sft=outputs/sft ppo=outputs/ppo --reward_model outputs/reward")
    assert said["next"] == "hybrid-rlhf export --model outputs/ppo --output_dir outputs/ppo-export --gguf f16"
    settings_file = place / "outputs/ppo/model/config.json"
    settings_file.parent.mkdir()
    settings_file.write_text('{"model_type": "opt"}')  # which our GGUF export does not know
    assert "--gguf" not in told(capsys, "ppo", "--data.sources=pairs.jsonl", "--output_dir=outputs/ppo")["next"]
    assert told(capsys, "ipo", "--data.sources=pairs.jsonl", "--output_dir=outputs/ipo")["chat"] == (
        "hybrid-rlhf chat --model outputs/ipo"), "its start is no run"


@pytest.mark.parametrize(("number", "text"), [(12_345, "12,345"), (134_515_008, "134.5M"), (1_235_814_400, "1.236B")])
def test_parameters_are_counted_as_people_do(number, text):
    assert announce._millions(number) == text


def test_before_the_first_step_stand_what_is_trained_of_the_model_and_how_long_the_run_is(capsys, tmp_path):
    module = nn.ModuleDict({"base": nn.Linear(100, 300, bias=False), "adapter": nn.Linear(10, 20, bias=False)})
    engine = SimpleNamespace(module=module, training=SimpleNamespace(parameters={"a": module["adapter"].weight}))
    config = parse(step1_sft.Config, ["--data.sources=x.jsonl", "--model.lora.r=4", "--train.max_seconds=90",
                                      "--model.lora.target_modules=[q_proj]",
                                      "--train.learning_rate=1e-4", "--train.num_train_epochs=2.5",
                                      "--output_dir=outputs/sft"], prog="test")[0]
    loader = Loader([{}] * 160, 8, list, 0, world=2)
    record = RunRecord(str(tmp_path), "sft", facts={"header": ["data: 20 rows"]})
    announce.before(record, config, {"policy": engine}, "base", 25, loader)
    lines = capsys.readouterr().err.splitlines()
    assert json.loads((tmp_path / "run.json").read_text())["facts"]["header"] == ["data: 20 rows", *lines]
    assert lines == [
        "model: base; trained: 200 of 30,200 parameters by LoRA of rank 4; float32 on " + announce.device().type,
        device_line(),
        "settings: train.learning_rate 0.0001, train.num_train_epochs 2.5",
        "run: 25 steps of 16 rows (2.5 epochs), no step begins after 1:30, to outputs/sft"]
    held = replace(config, model=replace(config.model, load_in_4bit=True))
    announce.before(record, held, {"policy": engine}, "base", 25, loader)  # and no layer is, as fused experts are not
    assert "; 4bit base (100% of it left in float32) on " in capsys.readouterr().err
    engine.training = SimpleNamespace(parameters=dict(module.named_parameters()))
    announce.before(record, config, {"actor": engine, "critic": engine}, "base", 10, loader)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert "trained: actor all 30,200 parameters, critic all 30,200 parameters" in first
    assert "10 steps of 16 rows (1 epoch)" in last


@pytest.mark.parametrize(("stage", "count", "drop_last", "words"), [
    ("sft", 100, False, "steps of 16 rows (1.43 epochs; the last step of each epoch has 4 rows), to"),
    ("sft", 5, False, "steps of 16 rows (10 epochs; the last step of each epoch has 5 rows), to"),
    ("ppo", 100, None, "steps of 16 prompts with 8 responses each (1.67 epochs; 4 of 100 prompts are left out of each "
                        "epoch, others in the next), to"),
    ("ppo", 96, None, "steps of 16 prompts with 8 responses each (1.67 epochs), to"),
    ("ppo", 161, None, "each (1 epoch; 1 of 161 prompts is left out of each epoch), to"),
    ("sft", 161, False, "10 steps of 16 rows (0.909 epochs), to"),
    ("ppo", 177, None, "each (0.909 epochs), to")])
def test_what_becomes_of_rows_that_fill_no_batch_is_said(stage, count, drop_last, words):
    config = parse(MODULES[stage].Config, ["--data.sources=x.jsonl", f"--stage={stage}"], prog="test")[0]
    if stage == "ppo":
        config = replace(config, ppo=replace(config.ppo, estimator="grpo", sampling=SamplingConfig(num_samples=8),
                                             num_ppo_epochs=1, num_minibatches=1),
                         train=replace(config.train, per_device_train_batch_size=8))
    loader = Loader([{}] * count, 8, list, 0, world=2, drop_last=drop_last)
    assert words in announce._run_line(config, 10, loader)


def test_a_packed_batch_is_counted_in_tokens():
    config = parse(step1_sft.Config, ["--data.sources=x.jsonl", "--data.packing=true", "--data.max_length=300"],
                   prog="test")[0]
    loader = Loader([{"input_ids": [0] * (100 + i)} for i in range(101)], 4, list, 0, drop_last=False)
    assert "26 steps of 4 rows, about 600 tokens packed into rows of at most 300 (1 epoch" in announce._run_line(
        config, 26, loader)


@pytest.mark.parametrize("stage, engine", [("sft", builders.policy_engine), ("reward", builders.scalar_engine)])
def test_weights_without_an_adapter_are_told_and_an_untied_head_is_none_of_them(stage, engine):
    """The head of this model is a quarter of its weights."""
    config = parse(MODULES[stage].Config, ["--data.sources=x.jsonl", "--model.lora.r=4"], prog="test")[0]

    def line(model: nn.Module) -> str:
        add_lora(model, config.model.lora)
        return announce._model_line(config, {"policy": engine(model, tiny_tokenizer())}, "base")

    make = tiny_causal_lm if stage == "sft" else tiny_scalar_model
    assert " by LoRA of rank 4; float32 on" in line(make(tie_word_embeddings=False))
    bare = make(tie_word_embeddings=False)
    bare.model.layers[0].mlp.experts = nn.ParameterList([nn.Parameter(torch.zeros(64, 300))])  # one matrix, no layer
    assert re.search(r" by LoRA of rank 4 \(none for 0: [2-4]\d% of the weights\); float32 on", line(bare))
