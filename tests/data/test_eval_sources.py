"""data.eval_sources: rows that are evaluated and never trained on."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import datasets
from hybrid_rlhf.data.datasets import DataConfig
from hybrid_rlhf.training.registry import PTX, READS
from tests.factories.tiny import save_tiny, tiny_tokenizer


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def places(tmp_path):
    train = [{"prompt": f"say {i}", "completion": f"red {i}"} for i in range(20)]
    apart = [{"prompt": f"tell {i}", "completion": f"blue {i}"} for i in range(3)]
    return write(tmp_path / "train.jsonl", train), write(tmp_path / "apart.jsonl", apart)


def built(places, tmp_path, reads=READS["sft"], **changes):
    train, apart = places
    config = DataConfig(**{"sources": [train], "eval_sources": [apart], "eval_fraction": 0.0,
                           "cache_dir": str(tmp_path / "cache"), **changes})
    tokenizer = tiny_tokenizer()
    found = datasets.build(config, reads, tokenizer, seed=0)
    texts = [[tokenizer.decode(row["input_ids"]) for row in part] for part in (found.train, found.held_out)]
    return (*texts, found.report)


def test_their_rows_are_held_out_and_those_of_the_sources_all_trained_on(places, tmp_path):
    train, held_out, report = built(places, tmp_path)
    assert len(train) == 20 and not any("blue" in text for text in train)
    assert len(held_out) == 3 and all("blue" in text for text in held_out)
    assert (report["read"], report["train"], report["held_out"], report["usable"]) == (23, 20, 3, 20)
    again = built(places, tmp_path)  # from the cache
    assert again == (train, held_out, report)


def test_a_share_of_the_sources_is_held_out_beside_them(places, tmp_path):
    train, held_out, _ = built(places, tmp_path, eval_fraction=0.8)
    assert sum("blue" in text for text in held_out) == 3 and len(train) + len(held_out) == 23 and len(held_out) > 3


def test_max_samples_leaves_them_whole(places, tmp_path):
    train, held_out, _ = built(places, tmp_path, max_samples=5)
    assert (len(train), len(held_out)) == (5, 3)


def test_what_holds_nothing_for_a_stage_is_passed_over_and_said(places, tmp_path):
    texts = write(tmp_path / "texts.jsonl", [{"text": f"long ago {i}"} for i in range(4)])
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "tell 1"}])
    train, held_out, report = built((texts, prompts), tmp_path, PTX)
    assert len(train) == 4 and not held_out and report["not_used"] == [prompts]


@pytest.mark.parametrize(("given", "said"), [
    ([{"path": "{apart}", "weight": 2.0}], "data.eval_sources: a source has a weight"),
    (["none.jsonl"], "data.eval_sources: none.jsonl does not exist"),
    ([{"path": "{apart}", "stage": ["sft"]}], "unknown key stage in data.eval_sources"),
    (3, "data.eval_sources: 3 is not a source"),
])
def test_faults_are_named_by_the_option(places, tmp_path, given, said):
    if isinstance(given, list):
        given = [{**g, "path": g["path"].format(apart=places[1])} if isinstance(g, dict) else g for g in given]
    with pytest.raises(UserError, match=said):
        built(places, tmp_path, eval_sources=given)


def test_a_run_evaluates_them_and_another_stage_refuses_them(places, tmp_path, capsys):
    save_tiny(tmp_path / "base")
    argv = [f"--data.sources={places[0]}", f"--data.eval_sources={places[1]}", "--data.eval_fraction=0"]
    run = ["--model.model_name_or_path", f"{tmp_path}/base", "--model.dtype=float32", "--train.max_steps=1",
           "--train.per_device_train_batch_size=4", "--output_dir", f"{tmp_path}/sft"]
    assert main(["--stage", "sft", *argv, *run]) == 0
    record = json.loads((tmp_path / "sft/run.json").read_text())
    assert record["facts"]["data"]["held_out"] == 3 and record["metrics"]["eval/loss"] > 0
    assert main(["--stage", "sft", *argv, "--data.eval_sources=[{path: x, stages: [sfft]}]", *run]) == 2
    assert "data.eval_sources: x names stage 'sfft' (did you mean sft?)" in capsys.readouterr().err
    assert main(["--stage", "evaluate", f"--evaluate.models=[{tmp_path}/base]", *argv[:2]]) == 2
    assert "data.eval_sources is not used by --stage evaluate; name what is asked by data.sources" in \
        capsys.readouterr().err
