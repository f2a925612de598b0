"""Real records in odd formats; skipped where absent (HYBRID_RLHF_SHARED, or ../shared/data beside the checkout)."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from hybrid_rlhf.data import chat
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.training.registry import READS
from tests.factories.tiny import tiny_tokenizer

SHARED = Path(os.environ.get("HYBRID_RLHF_SHARED") or Path(__file__).parents[3] / "shared" / "data")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SHARED.is_dir(), reason=f"no real data at {SHARED}")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tiny_tokenizer()
    chat.ensure_template(tokenizer)
    return tokenizer


def data_of(path: str, stage: str, tokenizer, **changes):
    settings = {"split": None, "eval_fraction": 0.0, "max_length": 4096, "max_prompt_length": 4096} | changes
    source = changes.pop("source", None) or Source(str(SHARED / path))
    config = DataConfig([source], **{k: v for k, v in settings.items() if k != "source"})
    return build(config, READS[stage], tokenizer, 0)


def texts(tokenizer, row: dict) -> tuple[str, str]:
    return tokenizer.decode(row["chosen_ids"]), tokenizer.decode(row["rejected_ids"])


def as_chatml(transcript: str) -> str:
    """An HH transcript as ChatML by plain replacement: an oracle that shares no code with the reader."""
    text = transcript.replace("\n\nHuman:", "<H>").replace("\n\nAssistant:", "<A>")
    pieces = [p for p in text.replace("<H>", "\0user\n").replace("<A>", "\0assistant\n").split("\0") if p]
    turns = [p.split("\n", 1) for p in pieces]
    return "<|im_end|>\n".join(f"<|im_start|>{who}\n{said.strip()}" for who, said in turns) + "<|im_end|>"


def test_all_hh_pairs_are_kept_or_counted_and_read_as_they_were_written(tokenizer):
    with gzip.open(SHARED / "hh_rlhf/test.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    data = data_of("hh_rlhf/test.jsonl.gz", "reward", tokenizer)
    assert data.report["read"] == len(rows) == 2312
    assert data.report["train"] + sum(data.report["dropped"].values()) == 2312
    assert data.report["train"] >= 2300
    written = {(as_chatml(r["chosen"]), as_chatml(r["rejected"])) for r in rows}
    assert all(texts(tokenizer, data.train[i]) in written for i in range(0, len(data.train), 7))
    for i in range(0, len(data.train), 7):
        row = data.train[i]
        assert row["chosen_ids"][: row["num_prompt_tokens"]] == row["rejected_ids"][: row["num_prompt_tokens"]]


def test_hh_pairs_over_the_length_are_dropped_and_counted(tokenizer):
    short = data_of("hh_rlhf/test.jsonl.gz", "reward", tokenizer, max_length=512)
    assert short.report["dropped"]["longer than max_length"] > 500
    assert max(max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in short.train) <= 512
    assert short.report["train"] + sum(short.report["dropped"].values()) == 2312


def test_gpteacher_records_train_on_the_response_alone(tokenizer):
    rows = json.loads(next((SHARED / "gpteacher").glob("*.json")).read_text(encoding="utf-8"))
    data = data_of("gpteacher", "sft", tokenizer)
    assert data.report["read"] == len(rows) == 1923
    assert len(data.train) + sum(data.report["dropped"].values()) == 1923
    responses = {r["response"].strip() + "<|im_end|>" for r in rows}
    for i in range(0, len(data.train), 50):
        row = data.train[i]
        if len(row["input_ids"]) < 4096:
            trained = [t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
            assert tokenizer.decode(trained).strip() in responses


def test_llmbar_prefers_the_output_that_its_label_names(tokenizer):
    rows = json.loads((SHARED / "llmbar/Natural_dataset.json").read_text(encoding="utf-8"))
    data = data_of("llmbar/Natural_dataset.json", "reward", tokenizer)
    assert len(data.train) == len(rows) == 100
    for row, tokens in zip(rows, data.train, strict=True):
        chosen, rejected = texts(tokenizer, tokens)
        assert chosen.endswith(row[f"output_{row['label']}"] + "<|im_end|>")
        assert rejected.endswith(row[f"output_{3 - row['label']}"] + "<|im_end|>")


def test_gsm8k_prompts_carry_their_answers(tokenizer):
    data = data_of("gsm8k/test.jsonl", "ppo", tokenizer)
    assert len(data.train) == 1319
    assert data.train[0]["answer"].endswith("#### 18")
    assert data.train[0]["text"].endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_dialogues_by_tab_are_read_and_the_odd_line_is_counted(tokenizer):
    data = data_of("simple_dialogs/dialogs.txt", "sft", tokenizer)
    assert (len(data.train), data.report["dropped"]) == (3724, {"no answer": 1})
    assert tokenizer.decode(data.train[0]["input_ids"]) == (
        "<|im_start|>user\nhi, how are you doing?<|im_end|>\n"
        "<|im_start|>assistant\ni'm fine. how about yourself?<|im_end|>")


def test_review_sentences_become_pairs_with_a_shared_prompt(tokenizer, tmp_path):
    sides = [(SHARED / f"rt_polarity/rt-polarity.{s}").read_text(encoding="utf-8").splitlines() for s in ("pos", "neg")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "Review:", "chosen": " " + a, "rejected": " " + b})
                              for a, b in zip(*sides, strict=True)))
    data = data_of("", "reward", tokenizer, source=Source(str(path)), raw=True)
    assert len(data.train) == len(sides[0]) == 5331
    assert texts(tokenizer, data.train[5])[0] == "Review: " + sides[0][5] + "<|im_end|>"


@pytest.mark.parametrize("model", ["stories3M-hf", "stories260K-hf"])
def test_a_real_sentencepiece_tokenizer_finds_boundaries_and_ends_with_its_own_eos(model):
    from hybrid_rlhf.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(SHARED / model))
    row = chat.encode(tokenizer, "Once upon a time", " there was a fox.")
    whole = tokenizer("Once upon a time there was a fox.")["input_ids"]
    assert row.ids == [*whole, tokenizer.eos_token_id]
    assert row.ids[: row.num_prompt_tokens] == chat.encode_prompt(tokenizer, "Once upon a time")
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :], skip_special_tokens=True).strip() == "there was a fox."
