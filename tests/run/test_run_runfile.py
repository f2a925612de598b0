"""run.json: stages find each other by it, finished work is left alone, and nothing of the user's is overwritten."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from dataclasses import dataclass, field

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.run import checkpoint, runfile
from tests.factories.tiny import tiny_tokenizer


@dataclass(frozen=True)
class Part:
    learning_rate: float = 1e-3
    betas: tuple[float, ...] = (0.9, 0.95)


@dataclass(frozen=True)
class Rewards:
    functions: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Acts:
    factory: object = None
    tools: object = ()


@dataclass(frozen=True)
class Config:
    output_dir: str = ""
    seed: int = 0
    resume: str = "auto"
    report_to: list[str] = field(default_factory=list)
    train: Part = field(default_factory=Part)
    reward: Rewards = field(default_factory=Rewards)
    environment: Acts = field(default_factory=Acts)


def finish(folder, stage: str = "sft", config: Config | None = None, tokenizer=None, **facts) -> runfile.RunRecord:
    record = runfile.start(folder, stage, config or Config(), "the command")
    record.finish({"loss": 1.5, "odd": float("nan")}, tokenizer=tokenizer or tiny_tokenizer(), **facts)
    return record


def refused(function, *given) -> str:
    """The one line that the user reads."""
    with pytest.raises(UserError) as error:
        function(*given)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_finished_run_tells_the_next_stage_what_it_needs(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}ä"
    finish(tmp_path, tokenizer=tokenizer, base_model="some/model", score_statistics={"mean": 0.5, "std": 2.0})
    found = runfile.require_finished(tmp_path, "sft")
    assert found.metrics == {"loss": 1.5, "odd": None}
    assert found.facts["base_model"] == "some/model" and found.facts["score_statistics"] == {"mean": 0.5, "std": 2.0}
    assert found.facts["chat_template"] == hashlib.sha256("{{ messages }}ä".encode()).hexdigest()
    assert found.config["train"] == {"learning_rate": 1e-3, "betas": [0.9, 0.95]} and found.command == "the command"
    assert found.started < found.finished and found.started.endswith("+00:00") and 0 <= found.seconds < 60
    assert {"hybrid_rlhf", "torch", "transformers", "python"} <= found.versions.keys()
    assert "learning_rate: 0.001" in (tmp_path / "config.yaml").read_text()


def test_no_path_in_run_json_leads_out_of_the_folder_when_it_is_moved(tmp_path):
    finish(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert runfile.read_run(tmp_path / "there").output_dir == str(tmp_path / "there")
    assert "output_dir" not in json.loads((tmp_path / "there" / "run.json").read_text()), "the folder says where it is"


def test_a_run_whose_reward_function_has_changed_since_is_refused_finished_or_not(tmp_path):
    code, config = tmp_path / "rewards.py", Config(reward=Rewards([f"{tmp_path / 'rewards.py'}:score"]))
    code.write_text("def score(completions):\n    return [1.0] * len(completions)\n")
    finish(tmp_path / "run", config=config)
    assert runfile.finished(tmp_path / "run", "sft", config).is_finished
    code.write_text("def score(completions):\n    return [2.0] * len(completions)\n")
    assert "rewards.py has changed since the run in output_dir" in refused(
        runfile.finished, tmp_path / "run", "sft", config)
    unfinished = runfile.start(tmp_path / "other", "sft", config, "the command")
    unfinished.close("stopped")
    code.write_text("def score(completions):\n    return [3.0] * len(completions)\n")
    assert "rewards.py has changed" in refused(runfile.start, tmp_path / "other", "sft", config, "the command")
    again = dataclasses.replace(config, resume="never")
    assert not runfile.start(tmp_path / "other", "sft", again, "the command").is_finished


@pytest.mark.parametrize("given", [{"factory": "{}:Game"}, {"factory": {"a": "builtin:word_game", "b": "{}:Game"}},
                                   {"tools": "{}:times"}, {"tools": ["builtin:calculator", "{}:times"]}])
def test_a_run_whose_tools_or_environment_have_changed_since_is_refused(tmp_path, given):
    code = tmp_path / "acts.py"
    code.write_text("first = 1\n")
    [(name, value)] = json.loads(json.dumps(given).replace("{}:", f"{code}:")).items()
    config = Config(environment=Acts(**{name: value}))
    finish(tmp_path / "run", config=config)
    assert runfile.finished(tmp_path / "run", "sft", config).is_finished
    code.write_text("second = 2\n")
    assert "acts.py has changed since the run" in refused(runfile.finished, tmp_path / "run", "sft", config)


def test_a_finished_run_is_left_as_it_is_and_says_so(tmp_path, capsys):
    finish(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    again = runfile.start(tmp_path, "sft", Config(report_to=["tensorboard"], output_dir="elsewhere"), "")
    assert again.is_finished and again.metrics["loss"] == 1.5
    assert "finished; nothing to do" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["base_model", "reward_model"])
def test_a_finished_run_whose_model_was_trained_again_is_refused(tmp_path, name):
    finish(tmp_path / "model")
    finish(tmp_path / "run", **{name: str(tmp_path / "model")})
    assert runfile.finished(tmp_path / "run", "sft", Config()).is_finished
    time.sleep(0.002)  # of which times are written
    finish(tmp_path / "model", config=Config(resume="never"))
    said = refused(runfile.finished, tmp_path / "run", "sft", Config())
    assert said.startswith(f"{tmp_path / 'model'} was trained again after the run in output_dir") and "\n" not in said


def test_a_finished_run_with_other_settings_is_refused_by_their_names(tmp_path):
    finish(tmp_path)
    line = refused(runfile.start, tmp_path, "sft", Config(seed=1, train=Part(learning_rate=2e-3)), "")
    assert "(seed, train.learning_rate)" in line and "--resume never" in line


def test_a_setting_that_the_older_release_did_not_know_is_no_difference(tmp_path):
    finish(tmp_path)
    raw = json.loads((tmp_path / "run.json").read_text())
    del raw["config"]["train"]["betas"]
    (tmp_path / "run.json").write_text(json.dumps(raw))
    assert runfile.start(tmp_path, "sft", Config(), "").is_finished


@pytest.mark.parametrize(("status", "resume", "said"), [
    ("finished", "never", "the finished sft run"), ("running", "auto", "the unfinished (running) sft run"),
    ("stopped", "auto", "the unfinished (stopped) sft run"), ("failed", "never", "the unfinished (failed) sft run"),
])
def test_a_run_started_again_says_so_and_mixes_nothing_with_the_old_one(tmp_path, capsys, status, resume, said):
    """Old checkpoints would count as the newest, and the new ones would be deleted as the oldest."""
    record = runfile.start(tmp_path, "sft", Config(), "")
    record.close(status)
    for name in ("metrics.jsonl", "samples.jsonl", "notes.txt"):
        (tmp_path / name).write_text("old\n")
    checkpoint.save(tmp_path / "checkpoints", 900, {"n": 1})
    again = runfile.start(tmp_path, "sft", Config(seed=1, resume=resume), "")
    assert said in capsys.readouterr().err and again.status == "running" and again.config["seed"] == 1
    assert checkpoint.latest(tmp_path / "checkpoints") is None
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "samples.jsonl").exists()
    assert (tmp_path / "notes.txt").read_text() == "old\n", "what is not the run's stays"


def test_an_empty_folder_and_one_where_the_first_write_was_cut_off_are_new(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / f".hybrid_rlhf-{0:016x}").write_text('{"stage": ')
    for name in ("empty", "cut", "deep/er"):
        assert runfile.start(tmp_path / name, "sft", Config(), "").status == "running"


@pytest.mark.parametrize("name", ["model", "thesis.tex", "config.yaml", ".hidden"])
def test_a_folder_that_holds_something_else_is_refused_and_untouched(tmp_path, name):
    (tmp_path / name).mkdir() if name == "model" else (tmp_path / name).write_text("mine")
    assert f"holds something else ({name})" in refused(runfile.start, tmp_path, "sft", Config(), "")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_other_wrong_output_folders_are_one_line_each(tmp_path):
    (tmp_path / "file").write_text("")
    finish(tmp_path / "reward", "reward")
    assert "is a file" in refused(runfile.start, tmp_path / "file", "sft", Config(), "")
    assert f"output_dir {tmp_path / 'file' / 'in'}" in refused(
        runfile.start, tmp_path / "file" / "in", "sft", Config(), "")
    assert "holds a reward run" in refused(runfile.start, tmp_path / "reward", "sft", Config(), "")
    assert "resume is 'yes'" in refused(runfile.start, tmp_path / "new", "sft", Config(resume="yes"), "")
    assert not (tmp_path / "new").exists()


def test_a_stage_without_its_predecessor_is_told_what_is_missing(tmp_path):
    runfile.start(tmp_path / "begun", "sft", Config(), "")
    finish(tmp_path / "other", "reward")
    (tmp_path / "empty").mkdir()
    assert "holds no run" in refused(runfile.require_finished, tmp_path / "empty", "sft")
    assert "holds no run" in refused(runfile.require_finished, tmp_path / "nowhere", "sft")
    assert "not finished (running); run --stage sft" in refused(runfile.require_finished, tmp_path / "begun", "sft")
    assert "holds a reward run" in refused(runfile.require_finished, tmp_path / "other", "sft")


GOOD = dataclasses.asdict(runfile.RunRecord("", "sft")) | {"versions": {}}
GOOD.pop("output_dir")


@pytest.mark.parametrize(("contents", "said"), [
    ("", "damaged"), ("{", "damaged"), ("[]", "damaged"), ("null", "damaged"), ("3", "damaged"), ("{}", "damaged"),
    ('{"format": "1"}', "damaged"), (b"\xff\xfe\x00", "damaged"), (GOOD | {"extra": 1}, "damaged"),
    ({"format": 1}, "damaged"),
    ({"format": 2, "what": "ever"}, "newer release"), (GOOD | {"format": 99}, "newer release"),
])
def test_a_run_json_that_is_not_ours_is_refused(tmp_path, contents, said):
    text = json.dumps(contents) if isinstance(contents, dict) else contents
    (tmp_path / "run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert said in refused(runfile.read_run, tmp_path)
    assert said in refused(runfile.start, tmp_path, "sft", Config(), "")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_run_json_is_never_half_written(tmp_path, monkeypatch, moment):
    record = finish(tmp_path)

    def fail(*_given):
        raise OSError("no space")

    monkeypatch.setattr(os, moment, fail)
    with pytest.raises(OSError, match="no space"):
        record.close("failed")
    assert runfile.read_run(tmp_path).is_finished


def test_the_tokenizers_hash_outlives_saving_and_use_but_not_a_change(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tiny_tokenizer()
    before = runfile.tokenizer_hash(tokenizer)
    tokenizer(["a", "longer text"], padding=True, truncation=True, max_length=4)  # leaves its settings in the backend
    assert runfile.tokenizer_hash(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    assert runfile.tokenizer_hash(AutoTokenizer.from_pretrained(tmp_path)) == before
    assert runfile.tokenizer_hash(tiny_tokenizer(vocab_size=290)) != before, "other merges"
    tokenizer.eos_token = "<|endoftext|>"
    assert runfile.tokenizer_hash(tokenizer) != before, "another end of sequence"
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    assert runfile.tokenizer_hash(tokenizer) != before, "another token"


def test_runs_that_read_the_same_text_differently_do_not_fit_together(tmp_path):
    other, dressed = tiny_tokenizer(290), tiny_tokenizer()
    dressed.chat_template = "{{ messages }}"
    actor = finish(tmp_path / "sft")
    for name, tokenizer, what in (("same", None, None), ("other", other, "tokenizers"),
                                  ("dressed", dressed, "chat templates")):
        given = {} if tokenizer is None else {"tokenizer": tokenizer}
        assert runfile.difference(actor, finish(tmp_path / name, "reward", **given)) == what


def test_a_start_that_died_with_the_lock_alone_leaves_a_folder_that_is_new(tmp_path):
    (tmp_path / "config.yaml").touch()
    assert not runfile.start(tmp_path, "sft", Config(), "mine").is_finished
