"""Tools in the chat: calls are shown as lines, /tool answers them, and what is saved is what SFT reads."""

from __future__ import annotations

import io
import json
import sys

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import compose_messages, encode_all
from hybrid_rlhf.data.schema import detect, read_row
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.inference.chat import repl
from hybrid_rlhf.inference.chat.session import Session, read_tools
from hybrid_rlhf.inference.conversation import Conversation
from tests.factories.chats import conversation
from tests.factories.tiny import save_tiny
from tests.factories.trl_templates import TOOLS, tokenizer_of

CALL = '<tool_call>\n{"name": "weather_of", "arguments": {"city": "Oslo"}}\n</tool_call>'
BOTH = f"{CALL}\n{CALL.replace('Oslo', 'Rome')}"


def talking(*answers: str, **changes) -> Conversation:
    found = conversation(*answers, tokenizer=tokenizer_of("qwen2_5"), tools=TOOLS, **changes)
    found.sampling = SamplingConfig(max_new_tokens=200)
    return found


def typed(monkeypatch, capsys, session: Session, *lines: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    code = repl.talk(session)
    return code, *capsys.readouterr()


def test_a_call_is_a_line_and_its_answer_lets_the_model_go_on(monkeypatch, capsys, tmp_path):
    talk, file = talking(f"I look.\n{CALL}", "It is cold."), tmp_path / "talk.jsonl"
    code, out, err = typed(monkeypatch, capsys, Session({"m": talk}), "How warm is it?", "/tool 7 degrees", "/history",
                           f"/save {file}")
    assert (code, out) == (0, 'I look.\nweather_of(city="Oslo")\nIt is cold.\n')
    assert "(/tool TEXT answers weather_of)" in err
    assert 'assistant: I look.\nweather_of(city="Oslo")\ntool: 7 degrees\n' in err
    call = {"type": "function", "id": "call00000", "function": {"name": "weather_of", "arguments": {"city": "Oslo"}}}
    row = {"messages": [
        {"role": "user", "content": "How warm is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "name": "weather_of", "tool_call_id": "call00000", "content": "7 degrees"},
        {"role": "assistant", "content": "It is cold."}], "tools": TOOLS}
    assert json.loads(file.read_text()) == row
    assert talk.engine.prompts[1] == talk.tokenizer.apply_chat_template(
        row["messages"][:3], tools=TOOLS, tokenize=False, add_generation_prompt=True)


def test_sft_trains_what_was_saved_as_it_was_said(monkeypatch, capsys, tmp_path):
    talk, file = talking(CALL, "It is cold."), tmp_path / "talk.jsonl"
    typed(monkeypatch, capsys, Session({"m": talk}), "How warm is it?", "/tool 7 degrees", f"/save {file}")
    row = json.loads(file.read_text())
    example = read_row(row, detect(row, "x"), "x")
    found = encode_all(talk.tokenizer, compose_messages(talk.tokenizer, example.messages))
    trained = [i for each in found for i, is_said in zip(each.ids, each.loss_mask, strict=True) if is_said]
    assert talk.tokenizer.decode(trained) == f"{CALL}<|im_end|>It is cold.<|im_end|>"


def test_several_calls_are_answered_one_after_the_other(monkeypatch, capsys):
    talk = talking(BOTH, "Both.")
    _, out, err = typed(monkeypatch, capsys, Session({"m": talk}), "?", "/tool 7", "/tool 20")
    assert out == 'weather_of(city="Oslo")\nweather_of(city="Rome")\nBoth.\n'
    assert "/tool TEXT answers weather_of too" in err
    assert [m["content"] for m in talk.messages if m["role"] == "tool"] == ["7", "20"]
    assert len({m["tool_call_id"] for m in talk.messages if m["role"] == "tool"}) == 2


def test_models_that_called_nothing_do_not_go_on(monkeypatch, capsys):
    session = Session({"a": talking(CALL, "Cold."), "b": talking("No idea.")})
    _, out, _ = typed(monkeypatch, capsys, session, "/compare on", "?", "/tool 7", "/undo")
    assert out == 'a:\nweather_of(city="Oslo")\nb:\nNo idea.\nCold.\n'
    assert [model.messages for model in session.chat_models.values()] == [[], []]


def test_a_call_that_cannot_be_read_is_shown_as_it_was_said_and_told(monkeypatch, capsys):
    bad = '<tool_call>\n{"name": "weather_of", "argu\n</tool_call>'
    talk = talking(f"So: {bad}")
    _, out, err = typed(monkeypatch, capsys, Session({"m": talk}), "?")
    assert out == f"So: {bad}\n"
    assert "(a tool call that cannot be read: " in err
    assert talk.messages[-1] == {"role": "assistant", "content": f"So: {bad}"}


def test_a_name_of_escape_sequences_is_shown_harmless(monkeypatch, capsys):
    call = CALL.replace("weather_of", "\\u001b[2J").replace("Oslo", "\\u001b[2J\\ud800")
    _, out, err = typed(monkeypatch, capsys, Session({"m": talking(call)}), "?")
    assert "\x1b" not in out + err and out.startswith("\u241b[2J(city=")


def test_what_was_saved_is_loaded_with_its_tools(monkeypatch, capsys, tmp_path):
    file = tmp_path / "talk.jsonl"
    first = talking(CALL)
    typed(monkeypatch, capsys, Session({"m": first}), "How warm is it?", f"/save {file}")
    later = talking("It is cold.")
    later.tools = []
    _, out, _ = typed(monkeypatch, capsys, Session({"m": later}), f"/load {file}", "/tool 7 degrees")
    assert (out, later.tools) == ("It is cold.\n", TOOLS)
    assert "weather_of" in later.engine.prompts[0] and "7 degrees" in later.engine.prompts[0]


def test_an_interrupted_call_takes_the_question_back(monkeypatch, capsys):
    talk = talking(CALL, interrupt_after=9)
    typed(monkeypatch, capsys, Session({"m": talk}), "?")
    assert talk.messages == []


def test_tool_without_a_call_is_one_line(monkeypatch, capsys):
    code, out, err = typed(monkeypatch, capsys, Session({"m": talking("Hi.")}), "/tool 7")
    assert (code, out, err.count("\n"), "no model has called a tool" in err) == (2, "", 1, True)


@pytest.mark.parametrize(("text", "said"), [
    ("{", "not JSON"), ("{}", "not a list"), ("[1]", "tool 1 has no name")])
def test_a_file_that_holds_no_tools_is_refused_in_one_line(text, said, tmp_path, capsys):
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(UserError, match=said):
        read_tools(str(file))
    assert repl.main(["--model", str(tmp_path / "none"), "--tools", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_tools_for_a_model_whose_template_has_none_are_refused_at_start(tmp_path, capsys):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS))
    folder = save_tiny(tmp_path / "model")
    capsys.readouterr()  # a bar of transformers, and below another
    assert repl.main(["--model", folder, "--tools", str(file), "--prompt", "hi"]) == 2
    out, err = capsys.readouterr()
    said = [line for line in err.split("\n") if line and "Loading weights" not in line]
    assert (out, len(said), "leaves out the tools" in said[0]) == ("", 1, True)
