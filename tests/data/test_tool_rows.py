"""Tools, calls and results as datasets write them: what is read, what is trained, and what is refused and counted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import compose_messages, encode_all, ensure_template
from hybrid_rlhf.data.datasets import DataConfig, build, describe, summary
from hybrid_rlhf.data.examples import KWARGS_UNREAD, TOOLS_LEFT_OUT
from hybrid_rlhf.data.schema import detect, read_row
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.data.turns import SkipRow, render
from hybrid_rlhf.models.template import special_ids
from hybrid_rlhf.training.registry import READS
from tests.factories.tiny import tiny_tokenizer
from tests.factories.trl_templates import CALLS, TOOLS, tokenizer_of

ASKED, ANSWER = {"role": "user", "content": "How warm is it?"}, {"role": "assistant", "content": "It is cold."}
CALL = {"type": "function", "function": {"name": "weather_of", "arguments": {"city": "Oslo"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "weather_of", "content": "7 degrees"}
ROW = {"messages": [ASKED, CALLING, RESULT, ANSWER], "tools": TOOLS}
FLAT = {"name": "weather_of", "arguments": {"city": "Oslo"}}
SAID = ('<tool_call>\n{"name": "weather_of", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>'
        "It is cold.<|im_end|>")


@pytest.fixture
def tokenizer():
    return tokenizer_of("qwen2_5")


def config_of(path, folder, **changes) -> DataConfig:
    return DataConfig([Source(str(path))], split=None, eval_fraction=0.0, cache_dir=str(folder / "cache"), **changes)


@pytest.fixture
def built(tmp_path, tokenizer):
    def build_rows(rows: list[dict], stage: str = "sft", tokenizer=tokenizer, **changes):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        return build(config_of(path, tmp_path, **changes), READS[stage], tokenizer, 0)

    return build_rows


def read(row: dict):
    return read_row(row, detect(row, "here"), "here")


def trained(tokenizer, row: dict) -> str:
    return tokenizer.decode([i for i, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])


def texts(tokenizer, data) -> list[tuple[str, str]]:
    return [(tokenizer.decode(row["input_ids"]), trained(tokenizer, row)) for row in data.train]


def calling(**more) -> dict:
    return {**ROW, "messages": [ASKED, {"role": "assistant", "content": None, **more}, RESULT, ANSWER]}


@pytest.mark.parametrize("row", [
    ROW,
    {**ROW, "tools": json.dumps(TOOLS)},
    {**ROW, "tools": [json.dumps(TOOLS[0])]},  # datasets' Json type, as other readers see it
    {**ROW, "tools": [TOOLS[0]["function"]]},
    {**ROW, "messages": [{**m, "tool_calls": m.get("tool_calls", [])} for m in ROW["messages"]]},
    {**ROW, "messages": [{"tool_calls": None, "name": None, **m} for m in ROW["messages"]]},
    {**ROW, "messages": json.dumps(ROW["messages"])},
    calling(tool_calls=[{"function": {"name": "weather_of", "arguments": '{"city": "Oslo"}'}}]),
    calling(tool_calls=[FLAT]),
    calling(tool_calls=json.dumps([CALL])),
    calling(tool_calls=[json.dumps(CALL)]),
    calling(function_call={"name": "weather_of", "arguments": '{"city": "Oslo"}'}),
    calling(tool_calls=[{**CALL, "function": {**CALL["function"], "arguments": {"city": "Oslo", "unit": None}}}]),
    {"prompt": [ASKED], "completion": [CALLING, RESULT, ANSWER], "tools": TOOLS},
    {"prompt": "How warm is it?", "completion": [CALLING, RESULT, ANSWER], "tools": json.dumps(TOOLS)},
    {"conversations": [{"from": "human", "value": "How warm is it?"},
                       {"from": "function_call", "value": json.dumps(FLAT)},
                       {"from": "observation", "value": "7 degrees"}, {"from": "gpt", "value": "It is cold."}],
     "tools": json.dumps([TOOLS[0]["function"]])},
], ids=lambda row: next(iter(row)))
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_every_way_to_write_a_call_is_the_same_row_of_which_calls_are_trained_and_results_are_not(built, row, name):
    tokenizer = tokenizer_of(name)
    (text, said), = texts(tokenizer, built([row], tokenizer=tokenizer))
    (expected, expected_said), = texts(tokenizer, built([ROW], tokenizer=tokenizer))
    assert (text, said) == (expected, expected_said)
    assert "7 degrees" in text and "Tells the weather." in text
    if name == "qwen2_5":
        assert said == SAID
    else:
        assert said == '{"name": "weather_of", "parameters": {"city": "Oslo"}}<|eot_id|>It is cold.<|eot_id|>'


@pytest.mark.parametrize("suffix", ["parquet", "saved", "jsonl"])
@pytest.mark.parametrize("mixed", [None, "use_json"])
def test_tables_that_give_every_message_and_call_the_keys_of_all_train_the_same(tmp_path, tokenizer, suffix, mixed):
    from datasets import Dataset

    rows = [{"messages": [ASKED, CALLING, RESULT, ANSWER], "tools": TOOLS},
            {"messages": [ASKED, {"role": "assistant", "tool_calls": [
                {"type": "function", "function": {"name": "sum_of", "arguments": {"a": 1, "b": 2}}}]},
                {"role": "tool", "content": "3"}, ANSWER],
             "tools": [{"type": "function", "function": {"name": "sum_of", "description": "Adds.", "parameters": {
                 "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}]},
            {"messages": [ASKED, ANSWER], "tools": None}]
    table, path = Dataset.from_list(rows, on_mixed_types=mixed), tmp_path / f"rows.{suffix}"
    {"parquet": table.to_parquet, "saved": table.save_to_disk, "jsonl": table.to_json}[suffix](path)
    found = texts(tokenizer, build(config_of(path, tmp_path), READS["sft"], tokenizer, 0))
    assert [said for _, said in found] == [
        SAID, '<tool_call>\n{"name": "sum_of", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
              "It is cold.<|im_end|>", "It is cold.<|im_end|>"]
    assert not any("null" in text or "None" in text for text, _ in found)
    assert ["weather_of" in text.split("<|im_start|>user")[0] for text, _ in found] == [True, False, False]
    assert ["sum_of" in text.split("<|im_start|>user")[0] for text, _ in found] == [False, True, False]
    assert ["<tools>" in text for text, _ in found] == [True, True, False]


@pytest.mark.parametrize("function", [{"name": "now"}, {"name": "now", "arguments": None},
                                      {"name": "now", "arguments": ""}, {"name": "now", "arguments": {"city": None}}])
def test_a_call_without_arguments_has_an_empty_object(built, tokenizer, function):
    (_, said), = texts(tokenizer, built([calling(tool_calls=[{"type": "function", "function": function}])]))
    assert said.startswith('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>')


def test_nulls_that_the_json_text_of_arguments_has_are_meant(built, tokenizer):
    (_, said), = texts(tokenizer, built([calling(tool_calls=[{**FLAT, "arguments": '{"city": null}'}])]))
    assert '"arguments": {"city": null}}' in said


@pytest.mark.parametrize(("content", "shown"), [
    ({"degrees": 7, "wind": None}, '{"degrees": 7}'), ([{"city": "Ål"}, {"x": 7}], '[{"city": "Ål"}, {"x": 7}]'),
    ([1, 2], "[1, 2]"), (7, "7"), (None, "null"), ([], "[]"), ([{"type": "text", "text": "warm"}], "warm")])
def test_a_result_that_is_no_text_is_shown_as_json(built, tokenizer, content, shown):
    row = {**ROW, "messages": [ASKED, CALLING, {**RESULT, "content": content}, ANSWER]}
    (text, said), = texts(tokenizer, built([row]))
    assert f"<tool_response>\n{shown}\n</tool_response>" in text and said == SAID


@pytest.mark.parametrize("arguments", ["Oslo", "[1]", 5])
def test_arguments_that_are_no_object_drop_the_row_and_are_counted(built, arguments):
    data = built([calling(tool_calls=[{**FLAT, "arguments": arguments}]), ROW])
    assert data.report["dropped"] == {"a tool call whose arguments are not a JSON object": 1} and len(data.train) == 1


def test_what_is_no_call_no_tool_and_no_text_is_said_in_one_line_or_counted():
    for calls, why in ((["x"], "a tool call must be an object, not str"),
                       ([{"type": "function"}], "a tool call needs the name of its function"),
                       (7, "tool_calls must be a list of tool calls, not int")):
        with pytest.raises(UserError, match=f"^here: messages: {why}; fix the row$"):
            read(calling(tool_calls=calls))
    for tools in ("hammer", [7]):
        with pytest.raises(UserError, match=r"^here: tools must be a list of tool schemas, not "):
            read({**ROW, "tools": tools})
    assert read({"text": "a", "tools": "hammer"}).tools == []  # rendered already: nothing is read beside it
    with pytest.raises(SkipRow, match="a message with parts that are not text"):
        read({"messages": [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "?"}]}, ANSWER]})
    with pytest.raises(SkipRow, match="a function_call that is not a JSON object"):
        read({"conversations": [{"from": "human", "value": "?"}, {"from": "function_call", "value": "weather_of"}]})


def test_a_prompt_of_text_has_its_tools_in_every_stage_and_it_is_said_where_it_cannot(built, tokenizer):
    row = {"prompt": "How warm is it?", "chosen": "It is cold.", "rejected": "No.", "tools": json.dumps(TOOLS)}
    sft, reward, ppo = (built([row], stage, max_prompt_length=1024).train[0] for stage in ("sft", "reward", "ppo"))
    for ids in (sft["input_ids"], reward["chosen_ids"], reward["rejected_ids"], ppo["prompt_ids"]):
        assert "Tells the weather." in tokenizer.decode(ids)
    assert ppo["prompt"] == [{"role": "user", "content": "How warm is it?", "tools": TOOLS}]
    for changes in ({"raw": True}, {"tokenizer": tiny_tokenizer()}):
        assert f"1 {TOOLS_LEFT_OUT}" in describe(built([row], **changes).report)
    data = built([{**ROW, "chat_template_kwargs": {"enable_thinking": False}}, {**ROW, "chat_template_kwargs": None}])
    assert f"data: 1 {KWARGS_UNREAD}" in summary(data.report)


@pytest.mark.parametrize("name", ["gemma3", "phi3_5", "llama3", "chatml"])
def test_a_template_that_cannot_show_tools_drops_such_rows_and_says_so_in_one_line(built, name):
    tokenizer = tiny_tokenizer() if name == "chatml" else tokenizer_of(name)
    ensure_template(tokenizer)
    data = built([ROW, ROW, {"messages": [ASKED, ANSWER], "tools": None}], tokenizer=tokenizer)
    assert len(data.train) == 1 and data.report["dropped"] == {"the chat template leaves out the tools": 2}
    assert summary(data.report)[-1] == ("warning: 2 of 3 rows (67%) are missing or cut in this stage: 2 dropped: the "
                                        "chat template leaves out the tools (rows.jsonl row 1, rows.jsonl row 2)")
    with pytest.raises(UserError, match=r"1 dropped: the chat template leaves out the tools \(rows.jsonl row 1\); "
                                        r"give other data, larger lengths or another data\.chat_template$"):
        built([ROW], tokenizer=tokenizer)


def test_no_part_of_a_tool_conversation_makes_a_special_token_or_holds_a_lone_surrogate(built, tokenizer):
    bad = "<|im_end|>\ud800"
    tool = {"type": "function", "function": {"name": "f", "description": bad, "parameters": {
        "type": "object", "properties": {bad: {"type": "string"}}}}}
    messages = [ASKED, {**CALLING, "tool_calls": [{"function": {"name": "f", "arguments": {bad: bad, "x": [bad]}}}]},
                {**RESULT, "name": bad, "content": {bad: bad}}, ANSWER]
    row, = built([{"messages": messages, "tools": [tool]}]).train
    special = list(special_ids(tokenizer).values())
    plain, = built([ROW]).train
    assert [i for i in row["input_ids"] if i in special] == [i for i in plain["input_ids"] if i in special]
    assert trained(tokenizer, row).count("<|im_end|>\ufffd") == 3


def test_the_template_of_the_example_shows_tools_and_writes_history_as_it_was_said():
    path = Path(__file__).resolve().parents[2] / "examples" / "tools" / "template.jinja"
    tokenizer = tiny_tokenizer()
    ensure_template(tokenizer, str(path))
    messages = read({"messages": CALLS, "tools": TOOLS}).messages
    texts = [render(tokenizer, messages[:end]) for end in range(1, 5)]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert texts[-1] == ("<|im_start|>system\nTools:\nweather_of(city): Tells the weather.<|im_end|>\n"
                         "<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
                         '{"name": "weather_of", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n'
                         "<|im_start|>user\n<tool_response>\n7 degrees\n</tool_response><|im_end|>\n"
                         "<|im_start|>assistant\nIt is cold.<|im_end|>\n")
    row, = encode_all(tokenizer, compose_messages(tokenizer, messages))
    assert tokenizer.decode([i for i, m in zip(row.ids, row.loss_mask, strict=True) if m]) == SAID
