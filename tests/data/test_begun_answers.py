"""A prompt whose last message is the assistant's is continued: no end of turn, no new turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.data.chat import SkipRow, compose_all, encode, encode_all, encode_prompt
from tests.factories.tiny import chatml_tokenizer
from tests.factories.trl_templates import TOOLS, names, tokenizer_of

ASKED = {"role": "user", "content": "What is one and one?"}
PARTS = ("smolvlm", "idefics3", "llava_next")


def begun(text: str) -> list[dict]:
    return [ASKED, {"role": "assistant", "content": text}]


def by_transformers(tokenizer, messages: list[dict]) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, continue_final_message=True, return_dict=False))


@pytest.mark.parametrize("name", [n for n in names() if n not in PARTS])
def test_a_prompt_is_what_transformers_continues(name):
    tokenizer = tokenizer_of(name)
    messages = begun("Step by step.\n<think>")
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    assert encode_prompt(tokenizer, messages) == by_transformers(tokenizer, messages)
    row = encode(tokenizer, messages, [{"role": "assistant", "content": "\nAdd one.\n</think>\n\n2."}])
    prompt = encode_prompt(tokenizer, messages)
    assert row.ids[: len(prompt)] == prompt and row.num_prompt_tokens == len(prompt)
    said = tokenizer.decode(row.ids[len(prompt) :])
    assert said.startswith("\nAdd one.\n</think>\n\n2.") and all(row.loss_mask[len(prompt) :])
    whole = encode(tokenizer, [ASKED], "2.").ids  # it ends as every answer does
    assert row.ids[-1] == whole[-1] and row.ids.count(whole[-1]) == whole.count(whole[-1])


@given(st.text("ab <>\n\u4e16", min_size=1, max_size=12), st.text("cd .\n", max_size=12))
@settings(max_examples=60, deadline=None)
def test_beginning_and_rest_are_the_whole_answer(first, rest):
    tokenizer = chatml_tokenizer()
    if not rest.strip() or not first.strip():
        return
    row = encode(tokenizer, begun(first), rest)
    assert tokenizer.decode(row.ids) == (f"<|im_start|>user\n{ASKED['content']}<|im_end|>\n"
                                         f"<|im_start|>assistant\n{first}{rest}<|im_end|>")
    prompt = by_transformers(tokenizer, begun(first))
    assert encode_prompt(tokenizer, begun(first)) == prompt and row.ids.count(3) == 2
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :]).endswith(f"{rest}<|im_end|>")


@pytest.mark.parametrize(("name", "prompt"), [
    ("qwen3", "<|im_start|>assistant\n<think>\nSo"), ("qwen3_5_think", "<|im_start|>assistant\n<think>\nSo")])
def test_a_thought_that_is_begun_stands_where_the_model_writes_one(name, prompt):
    tokenizer = tokenizer_of(name)
    text = tokenizer.decode(encode_prompt(tokenizer, begun("<think>\nSo")))
    assert text.endswith(prompt) and text.count("<think>") == 1
    row = encode(tokenizer, begun("<think>\nSo"), " it is.\n</think>\n\n2.")
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :]) == " it is.\n</think>\n\n2.<|im_end|>"


def test_turns_behind_a_begun_answer_are_trained_too():
    tokenizer = chatml_tokenizer()
    rest = [{"role": "assistant", "content": " two."}, {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Three."}]
    row, = encode_all(tokenizer, compose_all(tokenizer, begun("One,"), rest))
    text = tokenizer.decode(row.ids)
    assert "One, two.<|im_end|>" in text and text.endswith("Three.<|im_end|>")
    assert tokenizer.decode([i for i, m in zip(row.ids, row.loss_mask, strict=True) if m]) == (
        " two.<|im_end|>Three.<|im_end|>")


def test_a_call_behind_a_begun_answer_is_written_by_the_template():
    tokenizer = tokenizer_of("qwen2_5")
    call = {"type": "function", "function": {"name": "weather_of", "arguments": {"city": "Oslo"}}}
    prompt = [{**ASKED, "tools": TOOLS}, {"role": "assistant", "content": "I look"}]
    row = encode(tokenizer, prompt, [{"role": "assistant", "content": " it up.", "tool_calls": [call]}])
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :]) == (
        ' it up.\n<tool_call>\n{"name": "weather_of", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>')


def test_a_thought_in_a_field_cannot_follow_a_begun_answer():
    with pytest.raises(SkipRow, match="otherwise than its beginning"):
        encode(tokenizer_of("qwen3"), begun("Two"), [{"role": "assistant", "content": ".", "reasoning_content": "So."}])


def test_an_answer_that_is_begun_behind_its_thought_goes_on():
    tokenizer = tokenizer_of("gptoss")
    prompt = [ASKED, {"role": "assistant", "content": "Tw", "reasoning_content": "Add one."}]
    row = encode(tokenizer, prompt, "o.")
    assert row.ids[: row.num_prompt_tokens] == encode_prompt(tokenizer, prompt) == by_transformers(tokenizer, prompt)
    assert tokenizer.decode(row.ids[row.num_prompt_tokens :]) == "o.<|return|>"


@pytest.mark.parametrize("name", ["qwen3", "gemma4", "glm4moe", "llama3"])
def test_an_answer_that_says_nothing_yet_is_not_begun(name):
    tokenizer = tokenizer_of(name)
    prompt = list(tokenizer.apply_chat_template([ASKED], add_generation_prompt=True, return_dict=False))
    assert encode_prompt(tokenizer, begun("")) == encode_prompt(tokenizer, begun(" \n")) == prompt
    assert encode(tokenizer, begun(" "), "2.") == encode(tokenizer, [ASKED], "2.")
