"""What reward functions, judges and people read of a response: its text without the tokens that end it."""

from __future__ import annotations

import pytest

from hybrid_rlhf.inference.response_text import AnswerText, pieces
from hybrid_rlhf.models.tokenizer import completion_text
from tests.factories.tiny import chatml_tokenizer
from tests.factories.trl_templates import tokenizer_of

PAD, END_OF_TEXT, END = 0, 1, 3


@pytest.mark.parametrize("ending", [[], [END], [PAD], [END, PAD, PAD]])
def test_only_the_tokens_that_end_a_response_are_left_out(ending):
    tokenizer = chatml_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    ids = tokenizer("<think>\nAdd one.\n</think>\n\n2.")["input_ids"]
    assert len(ids) < len("<think>\nAdd one.\n</think>\n\n2.")  # each marker is a token
    assert completion_text(tokenizer, [*ids, *ending]) == "<think>\nAdd one.\n</think>\n\n2."


def test_a_stop_token_of_the_settings_ends_a_response_that_ended_by_it():
    tokenizer = chatml_tokenizer()
    ids = [*tokenizer("2.")["input_ids"], END_OF_TEXT]
    assert completion_text(tokenizer, ids, is_ended=True) == "2."
    assert completion_text(tokenizer, ids) == "2.<|endoftext|>"
    assert completion_text(tokenizer, [END, PAD]) == ""


HARMONY = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>4"


@pytest.mark.parametrize(("name", "said", "text"), [
    ("cohere2", "4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "4"), ("cohere2", "4<|END_RESPONSE|>", "4"),
    ("gptoss", "<|channel|>final<|message|>4<|return|>", "4"), ("gptoss", HARMONY + "<|return|>", HARMONY),
    ("gptoss", "<|channel|>", "<|channel|>"), ("muse_glimmer", " to=user<|message|>4<|eot|>", "4"),
    ("muse_glimmer", " to be<|eot|>", " to be"),
    ("qwen3", "<think>\n\n</think>\n\n4<|im_end|>", "<think>\n\n</think>\n\n4")])
def test_what_a_template_writes_around_an_answer_is_no_part_of_its_text(name, said, text):
    tokenizer = tokenizer_of(name)
    ids = tokenizer(said, add_special_tokens=False)["input_ids"]
    assert "".join(pieces(AnswerText(tokenizer, (), {tokenizer.eos_token_id}), ids)) == text
    assert completion_text(tokenizer, ids) == text
