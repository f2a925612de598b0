"""Every chat template that TRL ships: what is trained is what the model sees and says at that turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybrid_rlhf.data.chat import SkipRow, compose_messages, encode_all, encode_prompt
from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.models.template import dialect_of
from tests.factories.trl_templates import CALLS, CONVERSATIONS, SAID, SYSTEM, THOUGHTS, USER, names, tokenizer_of

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import write_templates  # noqa: E402

FOLDING = {"gemma"}  # refuses a system message
PARTS = {"smolvlm", "idefics3", "llava_next"}
REWRITING = {"deepseek_r1_distill", "deepseekv3", "gptoss", "nemotron_3_5_lightning", "nemotron_3_nano",
             "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
WITHOUT_TOOLS = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2",
                 "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"}


def trained(tokenizer, row) -> str:
    return tokenizer.decode([i for i, m in zip(row.ids, row.loss_mask, strict=True) if m])


class NoModel:
    generation_config = None


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", ["one turn", "three turns", "system"])
def test_no_conversation_is_lost_and_each_answer_stands_behind_the_prompt_of_its_rollout(name, kind):
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[kind]
    rows = encode_all(tokenizer, compose_messages(tokenizer, messages))
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    assert len(rows) == (len(turns) if name in REWRITING else 1)
    ends = stop_ids(NoModel(), tokenizer)
    for turn in turns:
        row = rows[turns.index(turn) if name in REWRITING else 0]
        prompt = encode_prompt(tokenizer, messages[:turn])
        assert row.ids[: len(prompt)] == prompt
        assert not row.loss_mask[len(prompt) - 1] and row.loss_mask[len(prompt)]
        said = row.ids[len(prompt) :]
        stop = next(i for i, token in enumerate(said) if token in ends)  # where a rollout of these tokens ends
        assert all(row.loss_mask[len(prompt) : len(prompt) + stop + 1])
        assert not any(row.loss_mask[len(prompt) + stop + 1 : len(prompt) + stop + 2])
        assert messages[turn]["content"] in tokenizer.decode(said[:stop])
    for row in rows:
        assert row.ids[-1] in ends and row.loss_mask[-1]
        text = trained(tokenizer, row)
        assert not any(words in text for words in (SYSTEM, *USER))
        assert tokenizer.decode(row.ids).count(SYSTEM) == (kind == "system")


@pytest.mark.parametrize("name", names())
def test_what_a_template_takes_is_found_by_trying_it(name):
    dialect = dialect_of(tokenizer_of(name))
    assert (dialect.takes_system, dialect.takes_parts) == (name not in FOLDING, name in PARTS)


@pytest.mark.parametrize("name", names())
def test_a_thought_is_trained_where_the_template_has_it_or_the_row_is_refused_for_it(name):
    tokenizer = tokenizer_of(name)
    if name == "qwen3_5_nothink":  # its generation prompt has ended the thought
        with pytest.raises(SkipRow, match="ends the thought before the answer"):
            compose_messages(tokenizer, THOUGHTS)
        return
    rows = encode_all(tokenizer, compose_messages(tokenizer, THOUGHTS))
    text = "".join(trained(tokenizer, row) for row in rows)
    found = [text.find(words) for pair in zip(("So 1.", "So 3.", "So 5."), SAID, strict=True) for words in pair]
    assert found == sorted(found) and found[0] >= 0
    for thought in ("So 1.", "So 3.", "So 5."):
        assert text.count(thought) == 1
    for row in rows:
        whole = tokenizer.decode(row.ids)
        assert whole.count("<think>") == whole.count("</think>")
        assert trained(tokenizer, row).count("<think>") <= 3


@pytest.mark.parametrize("name", names())
def test_tool_calls_are_trained_where_the_template_knows_them_and_else_the_row_is_refused(name):
    tokenizer = tokenizer_of(name)
    if name in WITHOUT_TOOLS:
        with pytest.raises(SkipRow, match=r"the chat template leaves out (the tools|tool calls)"):
            compose_messages(tokenizer, CALLS)
        return
    rows = encode_all(tokenizer, compose_messages(tokenizer, CALLS))
    text = "".join(trained(tokenizer, row) for row in rows)
    assert text.count("weather_of") >= 1 and text.count("Oslo") == 1 and text.count("It is cold.") == 1
    assert "Tells the weather" in tokenizer.decode(rows[0].ids) and "7 degrees" in tokenizer.decode(rows[-1].ids)
    assert not any(words in text for words in ("Tells the weather", "7 degrees", "How warm"))
    assert rows[-1].ids[: len(encode_prompt(tokenizer, CALLS[:3]))] == encode_prompt(tokenizer, CALLS[:3])
    assert all(row.ids[-1] in stop_ids(NoModel(), tokenizer) for row in rows)


def test_tool_calls_are_written_as_text_for_a_template_that_joins_strings():
    tokenizer = tokenizer_of("deepseekv3")  # it shows calls, but no list of tools
    messages = [{k: v for k, v in m.items() if k != "tools"} for m in CALLS]
    first, second = encode_all(tokenizer, compose_messages(tokenizer, messages))
    assert '{"city": "Oslo"}' in trained(tokenizer, first) and "It is cold." in trained(tokenizer, second)


def test_the_page_says_what_is_so():
    page = (ROOT / "docs" / "results" / "templates.md").read_text(encoding="utf-8")
    assert page == write_templates.page(), "write it anew: python docs/write_templates.py"
