"""What a run's model says to the same held-out prompts before its first step and after its last."""

from __future__ import annotations

import json

import pytest
import torch

from hybrid_rlhf.cli import main
from tests.crash.place import argv_of, prepare
from tests.factories.chats import without_end

STAGES = ("sft", "reward", "ppo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = prepare(tmp_path_factory.mktemp("answers"))
    for stage in STAGES:
        assert main(argv_of(made, stage, stage, 3, "--model.dtype", "float32")) == 0
    return made


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_held_out_prompts_are_asked_before_the_first_step_and_after_the_last(folder, stage) -> None:
    rows = [json.loads(line) for line in (folder / stage / "answers.jsonl").read_text().splitlines()]
    first, last = ([r for r in rows if r["step"] == step] for step in (0, 3))
    assert [r["prompt"] for r in first] == [r["prompt"] for r in last]
    assert len(first) == len(rows) // 2 == (6 if stage == "reward" else 3)  # three prompts are held out
    trained = {json.loads(line)["prompt"] for line in (folder / f"{stage}.jsonl").read_text().splitlines()}
    assert all(any(p in r["prompt"] for p in trained) for r in first)
    assert "before and after" in (folder / stage / "report.md").read_text()


def test_the_answers_are_what_the_models_say_greedily_in_transformers(folder) -> None:
    """Before: the SFT model that stage 3 starts from; after: the model that it leaves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = folder / "ppo"
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    for step, path in ((0, folder / "sft" / "model"), (3, out / "model")):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        for row in (r for r in rows if r["step"] == step):
            ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt").input_ids
            said = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
            assert without_end(tokenizer, said[0, ids.shape[1]:].tolist()) == row["completion"]
