"""Responses to be judged, wherever a row has them; and pairs that are read as what they are."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.labels import Asked, add, pair_row, read_asked
from hybrid_rlhf.data.schema import detect, read_row
from hybrid_rlhf.data.sources import Source


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


CELL = st.text(max_size=5) | st.lists(st.text(max_size=3) | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "x"]), "content": st.text(max_size=3) | st.none()}), max_size=3) \
    | st.none() | st.integers()
ROW = st.dictionaries(st.sampled_from(["prompt", "chosen", "rejected", "completions", "scores", "responses", "label",
                                       "completion", "response", "question", "response_j", "response_k", "margin",
                                       "answer", "instruction", "output", "output_1", "output_2", "input"]), CELL,
                      min_size=1, max_size=7)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=3))
def test_any_row_is_responses_or_a_user_error_and_its_pairs_are_read_as_pairs(tmp_path_factory, rows) -> None:
    try:
        found, _ = asked_of(tmp_path_factory.mktemp("r"), rows)
    except UserError as error:
        told = str(error)
        assert told and "\n" not in told
        return
    for each in found:
        assert len(set(each.responses)) == len(each.responses) and all(r.strip() for r in each.responses)
        if len(each.responses) > 1:
            row = json.loads(json.dumps(pair_row(each, *each.responses[:2], {"score_chosen": 1.0})))
            form = detect(row, "x")
            assert form.name == "preference"
            example = read_row(row, form, "x")
            said = [a if isinstance(a, str) else a[0]["content"] for a, _ in example.answers]
            assert said == each.responses[:2] and example.margin == 0
