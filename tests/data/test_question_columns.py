"""The question of a row is read from whichever columns carry it, and no text of a row vanishes without a line."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import SkipRow
from hybrid_rlhf.data.datasets import DataConfig, build, summary
from hybrid_rlhf.data.examples import decode_columns
from hybrid_rlhf.data.schema import FORMATS, Example, format_of, read_row
from hybrid_rlhf.rewards.functions import FunctionSource, open_functions
from hybrid_rlhf.training import reward_sources
from hybrid_rlhf.training.registry import READS
from tests.factories.chats import a, u
from tests.factories.tiny import chatml_tokenizer, own_cache


def reading(row: dict) -> Example:
    return read_row(row, format_of([row], "rows"), "rows row 1")


def said(part: object) -> str:
    return part if isinstance(part, str) else " ".join(m["content"] for m in part or ())


@pytest.fixture
def built(tmp_path, monkeypatch):
    own_cache(monkeypatch, tmp_path / "cache")

    def build_rows(rows: list[dict], stage: str, **changes):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return build(DataConfig([str(path)], eval_fraction=0.0, **changes), READS[stage], chatml_tokenizer(), 0)

    return build_rows


# the answers of each reader, and what makes them training rows
READERS = {
    "sft": {"response": "Purple."}, "reward": {"chosen": "Purple.", "rejected": "Green?"},
    "ranked": {"completions": ["Purple.", "Green?"], "scores": [1, 0]}, "kto": {"completion": "Purple.", "label": True},
    "ppo": {"response": "Purple."},
}


@pytest.mark.parametrize("stage", READERS)
def test_a_system_column_and_a_context_are_read_by_every_reader_in_the_same_way(built, stage):
    row = {"system_prompt": "Be terse.", "instruction": "Which colour?", "context": "It is purple."} | READERS[stage]
    data = built([row], "reward" if stage == "ranked" else stage)
    made = data.train[0]
    ids = made.get("prompt_ids") or made.get("chosen_ids") or made["input_ids"]
    text = ("<|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\nWhich colour?\n\nIt is purple.<|im_end|>\n"
            "<|im_start|>assistant\n")
    assert chatml_tokenizer().decode(ids).startswith(text)
    assert "data: 1 prompts joined from the columns system_prompt, instruction, context" in summary(data.report)


@pytest.mark.parametrize(("row", "prompt"), [
    ({"prompt": "Which colour?", "context": "Plums are purple."}, "Which colour?\n\nPlums are purple."),
    ({"prompt": "Plums are purple. Which colour?", "context": "Plums are  purple."}, "Plums are purple. Which colour?"),
    ({"prompt": [u("Which?"), a("What?"), u("Plums.")], "context": "C"}, [u("Which?\n\nC"), a("What?"), u("Plums.")]),
    ({"prompt": [u("Which?")], "question": "another"}, [u("Which?")]),  # messages are whole: named, not joined
    ({"prompt": [{"role": "system", "content": "S"}, u("Which?")], "system": "T"},
     [{"role": "system", "content": "S"}, u("Which?")]),
    ({"question": "Which?", "query": "Which?", "answer": "x"}, [u("Which?")]),
    ({"instruction": "Add 1 to it.", "input": "1", "output": "2"}, [u("Add 1 to it.\n\n1")]),
    # all of an Alpaca text, answer included, as sets of code have it: never a part of the question
    ({"instruction": "Add.", "input": "1 2", "output": "3", "prompt": "Add. 1 2 Response: 3"}, [u("Add.\n\n1 2")]),
    ({"context": [u("Hi"), a("Yo")], "prompt": "Why?"}, [u("Hi"), a("Yo"), u("Why?")]),
])
def test_what_the_question_is_of_some_columns(row, prompt):
    assert reading(row).prompt == prompt


TEXT = st.text("abc", min_size=3, max_size=8)


@settings(max_examples=100, deadline=None)
@given(form=st.sampled_from([f for f in FORMATS if f.kind != "text"]), extra=st.sampled_from(
    sorted({c for f in FORMATS for c in f.required} | {"system", "system_prompt", "passage", "category", "Title"})),
    data=st.data())
def test_any_further_text_is_in_the_prompt_or_an_answer_or_named(form, extra, data):
    values = {"scores": [1, 0], "ratings": [1, 0], "label": 1, "labels": 1, "preference_strength": 1,
              "overall_preference": 1, "completions": ["answer one", "answer two"], "generations": ["one", "two"],
              "messages": [u("ask this"), a("reply")], "conversations": [u("ask this"), a("reply")],
              "conversation": [u("ask this"), a("reply")], "answers": {"text": ["answer"]}}
    if form.name == "UltraFeedback":
        values["completions"] = [{"response": "one", "fine-grained_score": 1}]
    if form.name == "Nectar":
        values["answers"] = [{"answer": "one", "rank": 1}]
    row = {name: values.get(name, f"the {name}") for name in form.required}
    text = data.draw(TEXT)
    if extra in row:
        return
    row[extra] = text
    try:
        example = read_row(row, form, "rows row 1")
    except (SkipRow, UserError):
        return
    read = [example.prompt, example.messages, *(answer for answer, _ in example.answers)]
    assert any(text in said(part) for part in read) or extra in example.unread


def test_a_column_that_nothing_reads_is_named_once_with_what_to_do(built):
    rows = [{"question": "q", "answer": "a", "title": "T", "level": 3, "category": c} for c in ("x", "y", "")]
    lines = summary(built(rows, "sft").report)
    assert [line for line in lines if "not read" in line] == [
        "data: columns that are not read: title, category (to read one, name it in the source's columns, such as "
        "{context: title})"]
    assert not [line for line in summary(built([{"question": "q", "answer": "a"}], "sft").report) if "not read" in line]


def test_a_column_that_a_reward_function_is_given_is_read(built):
    for sources, unread in (([], ["title", "by"]), ([FunctionSource("f", lambda completions, **_: [1.0])], []),
                            ([FunctionSource("f", lambda completions, title: [1.0])], ["by"]),
                            (open_functions(["builtin:exact_match"], {"exact_match": {"column": "by"}}, 1.0),
                             ["title"])):
        report = built([{"prompt": "q", "title": "T", "by": "B"}], "ppo").report
        reward_sources.leave_unread(report, sources, None)
        assert list(report["unread"]) == unread


@pytest.mark.parametrize(("prompt", "chosen", "rejected", "answers"), [
    ("Say hi.", "Say hi. Hello", "Say hi.\nBye", [" Hello", "\nBye"]),
    ("你好？", "你好？你好！", "你好？不", ["你好！", "不"]),
    ("Hello", "Hello! Yes?", "Hello! No?", ["Hello! Yes?", "Hello! No?"]),  # a greeting, not the prompt again
    ("Hi", "Hi there", "Hi", ["Hi there", "Hi"]),
    ("Hi", "Hi Hi there", "Hi Hi you", [" Hi there", " Hi you"]),  # once
])
def test_where_the_prompt_is_taken_off(prompt, chosen, rejected, answers):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    assert [answer for answer, _ in reading(row).answers] == answers


GREETING = {"prompt": "Hello!", "chosen": "Hello! How can I help you today?", "rejected": "Hello! What do you want?"}
REPEATING = {"prompt": "Say hi.", "chosen": "Say hi. Hey", "rejected": "Say hi.\n\nBye"}


def test_a_prompt_is_taken_off_only_where_the_first_rows_of_a_source_repeat_it(built):
    tokenizer = chatml_tokenizer()

    def chosen(rows):
        data = built(rows, "reward")
        return [tokenizer.decode(row["chosen_ids"]).split("assistant\n")[1] for row in data.train]

    other = {"prompt": "red", "chosen": "blue", "rejected": "cat"}
    assert "Hello! How can I help you today?<|im_end|>" in chosen([GREETING, other])
    assert chosen([other, REPEATING, REPEATING])[1] == "Say hi. Hey<|im_end|>"
    assert chosen([REPEATING] * 3) == ["Hey<|im_end|>"] * 3
    asked = {"question" if k == "prompt" else k: v for k, v in REPEATING.items()}
    assert chosen([asked] * 2) == ["Hey<|im_end|>"] * 2  # a question is a turn whatever data.raw
    assert [answer for answer, _ in reading(asked).answers] == [[a("Hey")], [a("Bye")]]


def test_under_raw_a_string_prompt_stays_one_beside_a_system_column(built):
    row = {"system": "Be terse.", "prompt": "The sky is", "completion": " blue."}
    data = built([row], "sft", raw=True)
    assert chatml_tokenizer().decode(data.train[0]["input_ids"]).startswith("The sky is blue.")
    assert data.report["unread"] == {"system": 1}
    row["prompt"] = [u("red")]
    assert "Be terse." in chatml_tokenizer().decode(built([row], "sft", raw=True).train[0]["input_ids"])


def test_a_name_in_a_column_of_users_is_no_prompt():
    pairs = [{"chosen": "Purple.", "rejected": "Green.", "user": user} for user in ("ann", "bo", "Ann of the Hill")]
    assert format_of(pairs, "rows").name == "preference with implicit prompt"
    with pytest.raises(UserError, match=r"^rows: .* texts without a prompt, beside the column user"):
        format_of([pairs[0], pairs[2], pairs[2]], "rows")


def test_a_question_without_answer_is_a_prompt_and_no_demonstration(built):
    rows = [{"question": "red", "answers": []}, {"question": "dog", "answers": ["cat"]}]
    assert len(built(rows, "ppo").train) == 2
    assert built(rows, "sft").report["dropped"] == {"no answer": 1}


def test_a_prompt_that_two_conversations_do_not_begin_with_is_named():
    pair = {"chosen": [u("Hi"), a("Yo")], "rejected": [u("Hi"), a("No")]}
    assert reading({"prompt": "Hi", **pair}).unread == ()
    assert reading({"prompt": "Be brief.", **pair}).unread == ("prompt",)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"training": False}, {"trainable": False},
                                  {"loss_mask": 0}, {"loss": "false"}])
def test_an_answer_that_is_marked_is_read_and_not_trained(built, mark):
    turns = [u("red"), a("blue", **mark), u("green"), a("cat"), u("dog"), a("sun", **mark)]
    data = built([{"messages": turns}, {"messages": turns[:2]}], "sft")
    row, tokenizer = data.train[0], chatml_tokenizer()
    trained = [i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m]
    assert tokenizer.decode(trained) == "cat<|im_end|>" and "blue" in tokenizer.decode(row["input_ids"])
    assert len(data.train) == 1 and data.report["dropped"] == {"no answer that is to be trained": 1}
    assert "3 answers that are marked as not to be trained, and are not (weight 0)" in summary(data.report)[1]
    with pytest.raises(UserError, match=r"data.train_on is all, and some answers are marked"):
        built([{"messages": turns}], "sft", train_on="all")


def test_rows_with_images_are_dropped_and_counted_and_alone_they_are_one_line(built):
    rows = [{"prompt": "red", "completion": "blue", "image": image} for image in (None, "x.png")]
    data = built(rows, "sft")
    assert len(data.train) == 1
    assert data.report["dropped"] == {
        "a row with images, of which the model's folder has no processor (only text is read)": 1}


def test_images_of_a_table_are_dropped_without_being_decoded(tmp_path, monkeypatch):
    import datasets

    own_cache(monkeypatch, tmp_path / "cache")
    picture = {"bytes": b"no picture", "path": None}  # decoding it would fail
    table = datasets.Dataset.from_dict(
        {"prompt": ["red", "dog", "sun"], "completion": ["blue", "cat", "red"], "scan": [picture, None, None],
         "pages": [[], [None], [picture]]},
        features=datasets.Features({"prompt": datasets.Value("string"), "completion": datasets.Value("string"),
                                    "scan": datasets.Image(), "pages": datasets.List(datasets.Image())}))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    data = build(DataConfig([str(tmp_path / "rows.parquet")], eval_fraction=0.0), READS["sft"], chatml_tokenizer(), 0)
    assert data.report["dropped"] == {f"images in the column {name} (columns: {{images: {name}}} reads them)": 1
                                      for name in ("scan", "pages")}
    assert "cat" in chatml_tokenizer().decode(data.train[0]["input_ids"]) and len(data.train) == 1


@pytest.mark.parametrize(("row", "prompt"), [
    ({"question": "red", "answer": "blue"}, "red"),
    ({"instruction": "red", "input": "dog", "output": "cat"}, "red\n\ndog"),
    ({"question": "red", "answer": "blue", "system": "cat"}, [{"role": "system", "content": "cat"}, u("red")]),
    ({"question": [u("red")], "answer": "blue"}, [u("red")]),
    ({"question": "red", "history": [["dog", "cat"]], "answer": "blue"}, [u("dog"), a("cat"), u("red")]),
    ({"question": "red", "answer": "blue", "chat_template_kwargs": {"style": "terse"}},
     [u("red") | {"chat_template_kwargs": {"style": "terse"}}]),
])
def test_reward_functions_get_text_where_the_question_s_columns_are_text(built, row, prompt):
    assert [decode_columns(each)["prompt"] for each in built([row], "ppo").train] == [prompt]


def test_an_empty_question_is_counted_and_as_a_prompt_dropped(built):
    rows = [{"question": " ", "answer": "blue"}, {"question": "red", "answer": "blue"}]
    assert built(rows, "sft").report["rendered"]["rows with an empty question"] == 1
    assert built(rows, "ppo").report["dropped"] == {"empty prompt": 1}
