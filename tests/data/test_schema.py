"""Every known format reads to what it means, and an unknown one is told what would fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.messages import common_text, parse_transcript
from hybrid_rlhf.data.schema import FORMATS, KINDS, Example, detect, read_row


def u(text: str) -> dict:
    return {"role": "user", "content": text}


def a(text: str) -> dict:
    return {"role": "assistant", "content": text}


def reading(row: dict) -> tuple[str, Example]:
    form = detect(row, "rows")
    return form.name, read_row(row, form, "rows row 1")


HH = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant:"
PAIRS = {
    "preference": ({"prompt": "p", "chosen": " c", "rejected": " r"}, "p", " c", " r"),
    "preference of messages": ({"prompt": [u("p")], "chosen": [a("c")], "rejected": [a("r")]}, [u("p")], [a("c")],
                               [a("r")]),
    "whole conversations beside the prompt": (
        {"prompt": "p", "chosen": [u("p"), a("c")], "rejected": [u("p"), a("r")]}, [u("p")], [a("c")], [a("r")]),
    "implicit prompt of messages": (
        {"chosen": [u("p"), a("x"), u("q"), a("c")], "rejected": [u("p"), a("x"), u("q"), a("r")]},
        [u("p"), a("x"), u("q")], [a("c")], [a("r")]),
    "implicit prompt of text": ({"chosen": "The sky is blue.", "rejected": "The sky is black."}, "The sky is", " blue.",
                                " black."),
    "HH transcripts": ({"chosen": HH + " Because.", "rejected": HH + " No\n\nidea."}, [u("Hi"), a("Yes?"), u("Why?")],
                       [a("Because.")], [a("No\n\nidea.")]),
    "HH prompt with answers": ({"prompt": HH, "chosen": " Because.", "rejected": " No."},
                       [u("Hi"), a("Yes?"), u("Why?")],
                               "Because.", "No."),
    "StackExchange": ({"question": "q", "response_j": "better", "response_k": "worse", "qid": 7}, [u("q")],
                      [a("better")], [a("worse")]),
    "LLMBar": ({"input": "q", "output_1": "one", "output_2": "two", "label": 2}, [u("q")], [a("two")], [a("one")]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_read_as_prompt_better_and_worse(name):
    row, prompt, better, worse = PAIRS[name]
    _, example = reading(row)
    assert (example.prompt, example.answers, example.margin) == (prompt, [(better, 1.0), (worse, 0.0)], 0.0)


DEMONSTRATIONS = {
    "prompt-completion": ({"prompt": "p", "completion": " c"}, "p", " c"),
    "unpaired": ({"prompt": "p", "completion": "c", "label": True}, "p", "c"),
    "Alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, [u("Add.\n\n1 2")], [a("3")]),
    "Alpaca ": ({"instruction": "Add.", "input": "", "output": "3", "text": "..."}, [u("Add.")], [a("3")]),
    "GPTeacher": ({"instruction": "Be.", "input": None, "response": "ok"}, [u("Be.")], [a("ok")]),
    "question-answer": ({"question": "q", "answer": "42"}, [u("q")], [a("42")]),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_a_demonstration_is_read_as_prompt_and_completion(name):
    row, prompt, completion = DEMONSTRATIONS[name]
    found, example = reading(row)
    assert found == name.strip()
    assert (example.prompt, example.answers) == (prompt, [(completion, 1.0)])


CHAT = [u("Hi"), a("Hello"), u("Bye"), a("Ciao")]


@pytest.mark.parametrize("row", [
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"},
                       {"from": "human", "value": "Bye"}, {"from": "gpt", "value": "Ciao"}]},
    {"messages": [u([{"type": "text", "text": "Hi"}]), *CHAT[1:]]},
    {"messages": [{**m, "name": None} for m in CHAT]},
])
def test_a_conversation_is_read_whole_and_prompts_up_to_its_last_answer(row):
    _, example = reading(row)
    assert (example.messages, example.prompt) == (CHAT, CHAT[:3])


def test_a_sharegpt_system_column_is_the_first_message():
    _, example = reading({"system": "Be brief.", "conversations": [{"from": "human", "value": "Hi"},
                                                                   {"from": "gpt", "value": "Yo"}]})
    assert example.messages[0] == {"role": "system", "content": "Be brief."}


def test_ranked_rows_keep_every_answer_with_its_score_also_from_a_csv():
    want = [("x", 0.5), ("y", 2.0), ("z", 0.5)]
    assert reading({"prompt": "p", "completions": ["x", "y", "z"], "scores": [0.5, 2, 0.5]})[1].answers == want
    assert reading({"prompt": "p", "completions": '["x", "y", "z"]', "scores": "[0.5, 2, 0.5]"})[1].answers == want


def test_prompts_and_texts_are_read_and_other_columns_are_handed_on():
    assert reading({"prompt": HH})[1].prompt == [u("Hi"), a("Yes?"), u("Why?")]
    assert reading({"text": "Once."})[1].text == "Once."
    assert reading({"question": "q", "answer": "42", "level": 3})[1].columns == {"answer": "42", "level": 3}
    assert reading({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "0.5"})[1].margin == 0.5


def test_two_texts_that_begin_differently_are_a_pair_without_a_prompt():
    example = reading({"chosen": "a fine film", "rejected": "dull"})[1]
    assert example.prompt == "" and example.answers == [("a fine film", 1.0), ("dull", 0.0)]


@pytest.mark.parametrize(("row", "reason"), [
    ({"prompt": "p", "chosen": "same", "rejected": "same"}, "the two answers are the same"),
    ({"chosen": "same text", "rejected": "same text"}, "the two answers are the same"),
    ({"chosen": [u("p"), a("x")], "rejected": [u("q"), a("x")]}, "the two conversations do not part at an answer"),
    ({"chosen": [a("x")], "rejected": [a("y")]}, "the two conversations share no prompt"),
    ({"prompt": None}, "no prompt"),
    ({"messages": []}, "empty messages"),
    ({"prompt": "p", "completions": [], "scores": []}, "no completions"),
])
def test_a_row_without_meaning_is_refused_with_its_reason(row, reason):
    with pytest.raises(SkipRow) as refused:
        reading(row)
    assert str(refused.value) == reason


@pytest.mark.parametrize(("row", "said"), [
    ({"prompt": 3}, "rows row 1: prompt must be a string or a list of messages, not int"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "row 1: messages: unknown role 'robot'; there are human, "),
    ({"messages": [{"role": "user", "content": 4}]}, "the content of a message must be a string, not int"),
    ({"messages": "hello"}, "messages must be a list, not 'hello'"),
    ({"prompt": "p", "completions": ["x"], "scores": [1, 2]}, "1 completions but 2 scores"),
    ({"prompt": "p", "completion": "c", "label": "maybe"}, "label must be true or false, not 'maybe'"),
    ({"input": "q", "output_1": "x", "output_2": "y", "label": 3}, "label must be 1 or 2"),
    ({"prompt": "p", "chosen": "c", "rejected": "r", "margin": "big"}, "margin must be a number, not 'big'"),
])
def test_a_value_of_the_wrong_type_is_a_user_error_with_its_row(row, said):
    with pytest.raises(UserError) as error:
        reading(row)
    assert said in str(error.value)


def test_a_later_row_that_lacks_a_column_is_a_user_error_with_its_row():
    with pytest.raises(UserError, match="rows row 9: column completion is missing"):
        read_row({"prompt": "p"}, detect(["prompt", "completion"], "rows"), "rows row 9")


def test_unknown_columns_are_told_what_would_fit():
    with pytest.raises(UserError) as error:
        detect(["query", "reply\n"], "my.jsonl")
    message = str(error.value)
    assert message.startswith("my.jsonl: columns query, 'reply\\n' fit no known format; what would fit: ")
    for fitting in ("prompt+chosen+rejected", "chosen+rejected", "prompt+completion", "messages"):
        assert fitting in message
    assert message.endswith("""name yours: --data.sources "{path: my.jsonl, columns: {prompt: query, completion: """
                            """'reply\\n'}}\"""")
    assert "\n" not in message


def test_lone_surrogates_that_no_tokenizer_can_read_are_replaced():
    assert reading({"text": "a\ud800b\ud83d\ude00"})[1].text == "a\ufffdb\U0001f600"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "from", "value", "x"]), inner, max_size=3) | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "x"]), "content": inner}), max_leaves=8)
COLUMNS = sorted({c for f in FORMATS for c in (*f.required, *f.asks)} | {"margin", "system", "other"})


@settings(max_examples=400, deadline=None)
@given(form=st.sampled_from(FORMATS), values=st.dictionaries(st.sampled_from(COLUMNS), VALUES, max_size=4),
       required=st.lists(VALUES, min_size=4, max_size=4))
def test_any_values_are_read_or_refused_or_a_user_error_of_one_line(form, values, required):
    row = values | dict(zip(form.required, required, strict=False))
    message = ""
    try:
        example = read_row(row, form, "rows row 1")
        assert form.kind in KINDS
        assert example.prompt or example.messages or example.text is not None or example.prompt == ""
    except (SkipRow, UserError) as error:
        message = str(error)
    assert "\n" not in message


TURNS = st.lists(st.text("ab \n", min_size=1, max_size=6).map(str.strip).filter(bool), min_size=2, max_size=6)


@given(said=TURNS)
def test_a_transcript_says_what_was_put_into_it(said):
    names = ["Human", "Assistant"] * 3
    text = "".join(f"\n\n{who}: {what}" for who, what in zip(names, said, strict=False))
    turns = parse_transcript(text)
    assert [m["content"] for m in turns] == said
    assert [m["role"] for m in turns] == ["user", "assistant"] * (len(said) // 2) + ["user"] * (len(said) % 2)


@given(st.text("ab \n", max_size=12), st.text("ab \n", max_size=6), st.text("ab \n", max_size=6))
def test_an_implicit_text_prompt_and_its_answers_give_the_texts_back(shared, one, other):
    try:
        prompt, chosen, rejected = common_text(shared + one, shared + other)
    except SkipRow:
        return
    assert (prompt + chosen, prompt + rejected) == (shared + one, shared + other)
    assert chosen != rejected
