"""Reward models that read text get the whole episode, as their own template writes it."""

from __future__ import annotations

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.rewards import text_of
from hybrid_rlhf.rewards.model import read_by
from tests.factories.tiny import chatml_tokenizer
from tests.factories.trl_templates import tokenizer_of

ASKED = [{"role": "user", "content": "How warm is it?"}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
SAID = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "name": "weather", "content": "7"},
        {"role": "assistant", "content": "It is cold."}]


def test_an_episode_is_read_as_the_template_writes_it():
    tokenizer = tokenizer_of("qwen2_5")
    whole = tokenizer.apply_chat_template([*ASKED, *SAID], tokenize=False).removesuffix("\n")
    assert read_by(tokenizer, ASKED, SAID, True) == tokenizer(whole, add_special_tokens=False)["input_ids"]
    cut = whole.removesuffix("<|im_end|>")
    assert read_by(tokenizer, ASKED, SAID, False) == tokenizer(cut, add_special_tokens=False)["input_ids"]


def test_a_template_that_cannot_show_calls_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"a reward model cannot read a response: .*leaves out tool calls; give one"):
        read_by(chatml_tokenizer(), ASKED, SAID, True)


def test_functions_of_ours_read_what_the_model_said_last():
    assert text_of(SAID) == "It is cold." and text_of([*SAID, {"role": "user", "content": "Bye."}]) == "It is cold."
    assert text_of("plain") == "plain"
