"""Every bad input: exit code 2, one line that says what is wrong, where, and what would fit; nothing written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.models import load
from hybrid_rlhf.run.runfile import RunRecord
from hybrid_rlhf.training import step3_ppo
from tests.factories.tiny import own_cache, save_tiny, tiny_tokenizer
from tests.journeys.bad_input_table import BAD, PPO, REWARD, SFT, model

ROOT = Path(__file__).parents[2]
WORDS = ["red", "blue", "green", "cat", "dog", "fox", "sun", "moon", "tree", "book"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    _write_data(folder)
    _write_models(folder)
    _write_runs(folder)
    return folder


def _write_data(folder: Path) -> None:
    def table(name: str, rows: list[dict]) -> None:
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))

    table("demos.jsonl", [{"prompt": f"say {w}", "completion": w} for w in WORDS])
    table("pairs.jsonl", [{"prompt": f"say {w}", "chosen": w, "rejected": "no"} for w in WORDS])
    table("prompts.jsonl", [{"prompt": f"say {w}"} for w in WORDS])
    table("columns.jsonl", [{"alpha": 1, "beta": 2}])
    long = " ".join(WORDS * 5)
    table("long.jsonl", [{"prompt": f"{long} {w}", "completion": w} for w in WORDS])
    table("long_pairs.jsonl", [{"prompt": f"{long} {w}", "chosen": w, "rejected": "no"} for w in WORDS])
    (folder / "empty.jsonl").write_text("\n\n")
    (folder / "torn.jsonl").write_text('{"prompt": "a", "completion": "b"}\n\n{"prompt": "a", "comp\n')
    (folder / "numbers.jsonl").write_text("1\n2\n")
    (folder / "torn.yaml").write_text("train: {learning_rate: 1.0\nmodel: [\n")
    (folder / "list.yaml").write_text("- 1\n- 2\n")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01" * 9)
    (folder / "unknown.yaml").write_text("train:\n  learning_rat: 1.0\n")
    (folder / "section.yaml").write_text("trian:\n  learning_rate: 1.0\n")
    (folder / "type.yaml").write_text("train:\n  max_steps: many\n")


def _write_models(folder: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    good = Path(save_tiny(folder / "good"))
    (good / "config.xyz").write_text("{}")
    for name in ("no_weights", "no_tokenizer", "pickled", "damaged", "bad_config", "bad_tokenizer", "unknown_type",
                 "other_tokens", "twin"):
        shutil.copytree(good, folder / name)
    for name in ("no_weights", "pickled"):
        (folder / name / "model.safetensors").unlink()
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    weights = (good / "model.safetensors").read_bytes()
    (folder / "damaged" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (folder / "bad_config" / "config.json").write_text("{")
    (folder / "bad_tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "unknown_type" / "config.json").write_text('{"model_type": "no_such_model"}')
    (folder / "no_model").mkdir()
    (folder / "no_model" / "notes.txt").write_text("hello")
    tiny_tokenizer(290).save_pretrained(folder / "other_tokens")
    save_tiny(folder / "short", max_position_embeddings=32)
    save_tiny(folder / "mamba", kind="mamba", state_size=4, num_hidden_layers=1)
    T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
                               ).save_pretrained(folder / "t5")
    tiny_tokenizer().save_pretrained(folder / "t5")


def _write_runs(folder: Path) -> None:
    def run(name: str, stage: str, status: str, **more: object) -> None:
        (folder / name).mkdir(parents=True)
        RunRecord(str(folder / name), stage, status=status, **more).write()

    run("half/sft", "sft", "stopped")
    run("other_stage", "reward", "finished")
    run("other_settings", "sft", "finished", config={"seed": 7})
    (folder / "damaged_record").mkdir()
    (folder / "damaged_record" / "run.json").write_text('{"format": 1')
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.txt").write_text("years of work")


@pytest.fixture(autouse=True)
def _own_cache(place, tmp_path, monkeypatch) -> Iterator[None]:
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # what transformers says of missing kernels (Mamba's) goes to a stream that an earlier test has closed
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    shutil.rmtree(place / "runs", ignore_errors=True)  # only a failed test leaves it; the next ones shall not see it


def _tree(folder: Path) -> dict[str, tuple]:
    """Every path below `folder` with its size and time of change."""
    found = {p: p.lstat() for p in sorted(folder.rglob("*"))}
    return {str(p): (s.st_mtime_ns, s.st_size if p.is_file() else None) for p, s in found.items()}


def _at(place: Path, words: list[str]) -> list[str]:
    return [w.replace("PLACE", str(place)) for w in words]


@pytest.mark.parametrize(("argv", "wanted"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_written(place, capfd, argv, wanted) -> None:
    before = _tree(place)
    assert main(_at(place, argv)) == 2
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for part in _at(place, wanted):
        assert part in lines[0]
    assert len(lines[0].replace(str(place), "")) < 500, "one line, but not one that nobody can read"
    assert out == ""
    assert _tree(place) == before


BEFORE_WEIGHTS = ["tensor parallelism without enough processes", "quantised base with full fine-tuning",
                  "quantised base with full fine-tuning, ppo", "LoRA target that matches nothing",
                  "LoRA target that matches nothing, ppo", "one base without adapters", "one base for two models",
                  "minibatch larger than the rollout"]


@pytest.mark.parametrize(("argv", "wanted"), [row[1:] for row in BAD if row[0] in BEFORE_WEIGHTS])
def test_what_cannot_be_laid_out_is_said_before_any_weight_is_read(place, capfd, monkeypatch, argv, wanted) -> None:
    def read(*_given, **_named):
        raise AssertionError("weights are read")

    monkeypatch.setattr(load, "_load", read)
    assert main(_at(place, argv)) == 2
    assert all(part in capfd.readouterr().err for part in _at(place, wanted[:1]))


def test_a_minibatch_that_the_processes_cannot_share_evenly_is_refused(place, capfd, monkeypatch) -> None:
    monkeypatch.setattr(step3_ppo, "world_size", lambda: 2)
    assert main(_at(place, [*PPO, "--ppo.minibatch_size", "7"])) == 2
    assert "ppo.minibatch_size: a minibatch of 7 of the step's 16 sequences does not divide by the 2 processes" in (
        capfd.readouterr().err)
    assert main(_at(place, [*PPO, "--ppo.num_minibatches", "3", "--train.per_device_train_batch_size", "7"])) == 2
    assert "ppo.num_minibatches: a minibatch of 5 of the step's 14" in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_dir_that_cannot_be_written_is_refused(place, tmp_path, capfd) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    assert main(_at(place, [*SFT, "--output_dir", f"{tmp_path}/locked/run"])) == 2
    assert "cannot write to output_dir" in capfd.readouterr().err
    assert not list((tmp_path / "locked").iterdir())


def test_an_output_dir_without_the_right_to_write_is_refused_before_anything_is_loaded(place, capfd, monkeypatch
                                                                                       ) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **kw: str(path) != str(place) and may(path, mode, **kw))
    assert main(_at(place, model("none"))) == 2  # the model is missing too: the folder is looked at first
    assert "cannot write to output_dir" in capfd.readouterr().err


@pytest.mark.slow
def test_a_good_command_line_is_not_refused(place, tmp_path, capfd) -> None:
    """The table above means something only if its common part is right."""
    assert main([*_at(place, SFT), "--output_dir", str(tmp_path / "sft")]) == 0
    assert main([*_at(place, REWARD), "--output_dir", str(tmp_path / "reward")]) == 0
    assert main([*_at(place, PPO), "--output_dir", str(tmp_path / "ppo"),
                 "--roles.reward.model_name_or_path", str(tmp_path / "reward")]) == 0
    capfd.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("argv", [[*SFT, "--train.learning_rat", "1"], model("no_weights")],
                         ids=["unknown flag", "model without weights"])
def test_the_launcher_itself_answers_bad_input_with_one_line_and_exit_code_2(place, tmp_path, argv) -> None:
    """As a process, where other libraries' words would show too."""
    before = _tree(place)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *_at(place, argv)], capture_output=True, text=True,
                          cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    assert _tree(place) == before
