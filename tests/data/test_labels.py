"""Labelled rows: what of them are pairs, what are answers, and what cannot be used is counted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.labels import LabelledAnswer, LabelledPair, read_labels, spoken
from hybrid_rlhf.data.sources import Source


def labels_of(folder, rows: list[dict], limit: int | None = None, seed: int = 0):
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_labels(Source(str(path)), limit, seed)


def test_preferences_are_pairs_with_their_columns(tmp_path) -> None:
    said = [{"role": "assistant", "content": "b"}]
    found = labels_of(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": said, "by": "Ann"},
                                 {"prompt": "q", "chosen": "a", "rejected": "a", "by": "Ann"},
                                 {"prompt": "p", "chosen": " ", "rejected": "b", "by": "Ann"}])
    assert [pair[:3] for pair in found.pairs] == [("p", "a", "b")] and found.pairs[0].columns["by"] == "Ann"
    assert found.lost == {"the two answers are the same": 1, "an empty answer": 1}
    assert found.answers == [] and found.read == 3


def test_graded_answers_are_every_two_of_different_grade(tmp_path) -> None:
    found = labels_of(tmp_path, [{"prompt": "p", "completions": ["bad", "good", "best", "good too"],
                                  "scores": [1, 2, 3, 2]}, {"prompt": "q", "completions": ["a"], "scores": [1]}])
    assert found.lost == {"one answer alone, beside pairs": 1}
    assert {(p.better, p.worse) for p in found.pairs} == {
        ("best", "good"), ("best", "good too"), ("best", "bad"), ("good", "bad"), ("good too", "bad")}
    assert {p.prompt_number for p in found.pairs} == {0}


def test_answers_labelled_one_by_one_stay_so(tmp_path) -> None:
    found = labels_of(tmp_path, [{"prompt": "p", "completion": "a", "label": True},
                                 {"prompt": "q", "completion": "b", "label": False},
                                 {"prompt": "p", "completion": "", "label": False}])
    assert [(a.answer, a.label, a.prompt_number) for a in found.answers] == [("a", 1.0, 0), ("b", 0.0, 1)]
    assert found.pairs == [] and found.lost == {"an empty answer": 1}


def test_what_holds_no_labels_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"holds no labels; give prompt\+chosen\+rejected"):
        labels_of(tmp_path, [{"prompt": "p", "completion": "c"}])
    with pytest.raises(UserError, match="no label can be used: 1 x no two answers of different score"):
        labels_of(tmp_path, [{"prompt": "p", "completions": ["a", "b"], "scores": [1, 1]}])
    with pytest.raises(UserError, match="every answer has the same label"):
        labels_of(tmp_path, [{"prompt": "p", "completion": "c", "label": True}] * 2)
    turns = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(UserError, match="no label can be used: 2 x an answer of several turns"):
        labels_of(tmp_path, [{"prompt": "p", "chosen": turns, "rejected": [*turns, turns[0]]}])


def test_a_limit_draws_rows_by_the_seed(tmp_path) -> None:
    rows = [{"prompt": f"p{i}", "chosen": "a", "rejected": "b"} for i in range(30)]
    drawn = [[p.prompt for p in labels_of(tmp_path, rows, 5, seed).pairs] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 5
    assert len(labels_of(tmp_path, rows, 40).pairs) == 30


TEXT = st.text(max_size=6) | st.lists(st.fixed_dictionaries({
    "role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=4)}), max_size=3)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(
    st.fixed_dictionaries({"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}),
    st.fixed_dictionaries({"prompt": TEXT, "completions": st.lists(TEXT, max_size=4),
                           "scores": st.lists(st.integers(0, 2), max_size=4)}),
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT, "label": st.sampled_from([True, 0, "yes", "maybe"])})),
    min_size=1, max_size=5))
def test_any_rows_are_labels_or_a_user_error_of_one_line(tmp_path_factory, rows) -> None:
    try:
        found = labels_of(tmp_path_factory.mktemp("l"), rows)
    except UserError as error:
        told = str(error)
        assert told and "\n" not in told
        return
    assert bool(found.pairs) != bool(found.answers)
    for each in (*found.pairs, *found.answers):
        assert isinstance(each, LabelledPair | LabelledAnswer) and each.prompt
        texts = [each.better, each.worse] if isinstance(each, LabelledPair) else [each.answer]
        assert all(isinstance(text, str) and text.strip() for text in texts) and len(set(texts)) == len(texts)


def test_what_an_answer_says() -> None:
    assert spoken("a") == "a" and spoken([{"role": "assistant", "content": "b"}]) == "b"
    assert spoken([{"role": "user", "content": "b"}]) is None
    assert spoken([{"role": "assistant", "content": "", "tool_calls": [{}]}]) is None
