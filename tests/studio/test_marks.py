"""Marks on answers are whole lines, and rows that the stages read as they were meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid_rlhf.data.chat import encode_prompt
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.studio.marks import listed, mark
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.training.registry import READS
from tests.factories.tiny import chatml_tokenizer

ASKED = [{"role": "user", "content": "What is it?"}]
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Red or blue?"},
        {"role": "assistant", "content": " Red."}, {"role": "user", "content": "  Why?\u2028Say."}]
TALK_TEXT = ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nRed or blue?<|im_end|>\n"
             "<|im_start|>assistant\n Red.<|im_end|>\n<|im_start|>user\n  Why?\u2028Say.<|im_end|>\n"
             "<|im_start|>assistant\n")


@pytest.fixture
def studio(tmp_path):
    (tmp_path / "outputs").mkdir()
    return Studio((tmp_path / "outputs").resolve())


@pytest.fixture
def cached(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_RLHF_CACHE", str(tmp_path / "cache"))


def pair(studio, chosen="a", rejected="b", prompt=ASKED, how="compared", name="marks"):
    return mark(studio, {"name": name, "kind": "pair", "prompt": prompt, "chosen": chosen, "rejected": rejected,
                         "how": how})


def thumb(studio, completion="a", is_good=True, prompt=ASKED, name="marks"):
    return mark(studio, {"name": name, "kind": "thumb", "prompt": prompt, "completion": completion, "is_good": is_good})


def rows(path: str) -> list[dict]:
    text = Path(path).read_bytes().decode()
    assert text.endswith("\n")
    return [json.loads(line) for line in text[:-1].split("\n")]


def trained(path: str, stage: str) -> list[dict]:
    data = build(DataConfig([Source(path)], eval_fraction=0.0), READS[stage], chatml_tokenizer(), 0)
    assert not data.report["dropped"]
    return list(data.train)


@pytest.mark.parametrize("stage", ["dpo", "reward"])
def test_a_pair_is_read_as_it_was_said_spaces_turns_and_system_message_included(studio, cached, stage):
    pair(studio, "  Because it is.", " No\u0085no.\r\n", TALK, how="edited")
    found = pair(studio, " 5", "five", ASKED)
    assert (found["pairs"], found["thumbs"]) == (2, 0)
    tokenizer = chatml_tokenizer()
    first, second = sorted(trained(found["pairs_path"], stage), key=lambda row: -len(row["chosen_ids"]))
    whole = TALK_TEXT + "  Because it is.<|im_end|>"
    assert tokenizer.decode(first["chosen_ids"]) == whole
    assert tokenizer.decode(first["rejected_ids"]) == TALK_TEXT + " No\u0085no.\r\n<|im_end|>"
    prompt = encode_prompt(tokenizer, TALK)  # what the model was asked when it answered
    assert first["chosen_ids"][: len(prompt)] == prompt and tokenizer.decode(prompt) == TALK_TEXT
    assert tokenizer.decode(second["chosen_ids"]).endswith("assistant\n 5<|im_end|>")


def test_a_thumb_is_read_with_its_label(studio, cached):
    thumb(studio, "  Because.", True, TALK)
    found = thumb(studio, "No.", False, TALK)
    tokenizer = chatml_tokenizer()
    said = {tokenizer.decode(row["input_ids"]): row["label"] for row in trained(found["thumbs_path"], "kto")}
    assert said == {TALK_TEXT + "  Because.<|im_end|>": True, TALK_TEXT + "No.<|im_end|>": False}


def test_a_mark_that_contradicts_one_takes_its_place(studio):
    pair(studio, "a", "b")
    pair(studio, "c", "b")
    found = pair(studio, "b", "a", how="edited")
    assert [(r["chosen"][0]["content"], r["rejected"][0]["content"], r["how"]) for r in rows(found["pairs_path"])] == [
        ("c", "b", "compared"), ("b", "a", "edited")]
    thumb(studio, "a", True)
    thumb(studio, "a", True, TALK)
    found = thumb(studio, "a", False)
    assert [(r["prompt"], r["label"]) for r in rows(found["thumbs_path"])] == [(TALK, True), (ASKED, False)]
    assert thumb(studio, "a", None)["thumbs"] == 1 and thumb(studio, "z", None)["thumbs"] == 1
    assert [r["prompt"] for r in rows(found["thumbs_path"])] == [TALK]


def test_better_words_for_an_answer_take_the_place_of_those_before(studio):
    pair(studio, "first try", "said", how="edited")
    pair(studio, "second try", "said", how="edited")
    counts = pair(studio, "another answer", "said")  # compared: two answers of models stay a pair of their own
    rows = [json.loads(line) for line in Path(counts["pairs_path"]).read_text().splitlines()]
    assert [row["chosen"][0]["content"] for row in rows] == ["second try", "another answer"]


def test_lines_that_others_wrote_stay(studio):
    path = pair(studio)["pairs_path"]
    with open(path, "ab") as file:
        file.write(b'not JSON \xff\n[1]\n{"prompt": "mine"}')
    found = pair(studio, "c", "d")
    lines = Path(path).read_bytes().split(b"\n")
    assert lines[1:4] == [b"not JSON \xff", b"[1]", b'{"prompt": "mine"}']
    assert (json.loads(lines[4])["chosen"], lines[5:]) == ([{"role": "assistant", "content": "c"}], [b""])
    assert found["pairs"] == 5


@pytest.mark.parametrize("name", ["", " a", ".a", "../a", "a/b", "a\n", "é", "a" * 81])
def test_only_plain_names_are_files(studio, name):
    with pytest.raises(Refused, match="a name of marks"):
        thumb(studio, name=name)
    assert listed(studio) == []


def test_names_may_have_spaces_and_dots_and_are_listed(studio):
    thumb(studio, name="my marks 2.1")
    pair(studio, name="other_marks-2")
    (studio.home / "marks" / "notes.txt").write_text("x")
    assert [(f["name"], f["pairs"], f["thumbs"]) for f in listed(studio)] == [
        ("my marks 2.1", 0, 1), ("other_marks-2", 1, 0)]


@pytest.mark.parametrize("change", [
    {"chosen": " \n"}, {"rejected": ""}, {"rejected": "a"}, {"kind": "thumb", "completion": " ", "is_good": True}])
def test_what_is_no_mark_is_refused_in_one_line(studio, change):
    body = {"name": "m", "kind": "pair", "prompt": ASKED, "chosen": "a", "rejected": "b", "how": "edited"} | change
    with pytest.raises(Refused) as caught:
        mark(studio, body)
    assert caught.value.status == 400 and "\n" not in str(caught.value)
    assert listed(studio) == []
