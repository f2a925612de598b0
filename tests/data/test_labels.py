"""Labelled rows: what of them are pairs, what are answers, and what cannot be used is counted."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.labels import Asked, add, pair_row, read_asked, read_labels
from hybrid_rlhf.data.schema import detect, read_row
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


# -- Responses to be judged, wherever a row has them; and pairs that are read as what they are -------------------------


def asked_of(folder, rows: list[dict], columns=None, with_responses: bool = True) -> tuple[list[Asked], Counter]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lost: Counter[str] = Counter()
    return read_asked([Source(str(folder / "rows.jsonl"))], columns, with_responses, lost), lost


def message(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(("row", "columns", "responses"), [
    ({"prompt": "p", "chosen": "a", "rejected": "b"}, None, ["a", "b"]),
    ({"prompt": "p", "chosen": message("a"), "rejected": "b"}, None, ["a", "b"]),
    ({"prompt": "p", "completions": ["b", "a", "b"], "scores": [1, 2, 3]}, None, ["b", "a"]),
    ({"prompt": "p", "responses": ["a", message("b"), {"role": "assistant", "content": "c"}]}, None, ["a", "b", "c"]),
    ({"prompt": "p", "responses": '["a", "b"]'}, None, ["a", "b"]),  # as a table has it
    ({"prompt": "p", "responses": "[a, b"}, None, ["[a, b"]),
    ({"prompt": "p", "mine": "a", "yours": ["b", "c"], "chosen": "x", "rejected": "y"}, ["mine", "yours"],
     ["a", "b", "c"]),
    ({"question": "p", "response_j": "a", "response_k": "b"}, None, ["a", "b"]),
    ({"instruction": "p", "output": "a"}, None, ["a"]),
    ({"instruction": "p", "completions": [{"response": "a", "fine-grained_score": 1.0}]}, None, ["a"]),
    ({"prompt": "p", "completion": "a", "label": False}, None, ["a"]),
    ({"prompt": "p"}, None, []),
])
def test_where_a_row_has_its_responses(tmp_path, row, columns, responses) -> None:
    (found,), _ = asked_of(tmp_path, [row], columns)
    assert found.responses == responses
    assert asked_of(tmp_path, [row], None, with_responses=False)[0][0].responses == []


def test_rows_of_one_prompt_with_one_response_each_are_put_together(tmp_path) -> None:
    found, lost = asked_of(tmp_path, [{"prompt": "p", "completion": "a", "by": 1}, {"prompt": "q", "completion": "a"},
                                      {"prompt": "p", "completion": "b"}, {"prompt": "p", "completion": "a"}])
    assert [(each.prompt, each.responses) for each in found] == [("p", ["a", "b"]), ("q", ["a"])]
    assert found[0].columns == {"by": 1} and lost == {"the same response twice": 1}


def test_what_cannot_be_judged_is_counted(tmp_path) -> None:
    turns = [*message("a"), {"role": "user", "content": "b"}]
    found, lost = asked_of(tmp_path, [{"prompt": "p", "completions": ["a", " ", turns, "a"], "scores": [1, 2, 3, 4]},
                                      {"prompt": "", "completions": ["a", "b"], "scores": [1, 2]}])
    assert [each.responses for each in found] == [["a"]]
    assert lost == {"an empty answer": 1, "an answer of several turns": 1, "the same response twice": 1, "no prompt": 1}
    add(found[0], ["a", "c", ""], lost)
    assert found[0].responses == ["a", "c"] and lost["the same response twice"] == 2 and lost["an empty answer"] == 2


def test_tools_stay_in_their_column_and_the_prompt_is_as_it_was(tmp_path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompt = [{"role": "user", "content": "p"}]
    (found,), _ = asked_of(tmp_path, [{"prompt": prompt, "chosen": "a", "rejected": "b", "tools": tools}])
    row = pair_row(found, "b", "a", {"score_chosen": 1.0})
    assert row == {"prompt": prompt, "chosen": message("b"), "rejected": message("a"), "tools": tools,
                   "score_chosen": 1.0}
    assert read_row(row, detect(row, "x"), "x").tools == tools


def test_what_has_no_prompts_or_no_such_column_is_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="which has no prompts"):
        asked_of(tmp_path, [{"text": "a"}])
    with pytest.raises(UserError, match=r"has no column replies; it has prompt, said"):
        asked_of(tmp_path, [{"prompt": "p", "said": "a"}], ["replies"])
