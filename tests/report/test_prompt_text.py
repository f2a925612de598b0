"""Of a prompt as a chat template writes it, a reader sees the last turn; the rest is folded."""

from __future__ import annotations

import pytest

from hybrid_rlhf.report.html import html
from hybrid_rlhf.report.terminal import last_turn, sample_lines

CHATML = ("<|im_start|>system\nYou are kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello."
          "<|im_end|>\n<|im_start|>user\nWhat is <b>2</b>\n+ 3?<|im_end|>\n<|im_start|>assistant\n")
PROMPTS = {  # as published templates write them
    CHATML: "What is <b>2</b>\n+ 3?",
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n": "Why?",
    "<bos><start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n": "Why?",
    "<s>[INST] Hi [/INST] Hello.</s>[INST] Why? [/INST]": "Why?",
    "<|user|>System failure: why?</s>\n<|assistant|>\n": "System failure: why?",
    "<|user|>\nWhy?</s>\n<|assistant|>\n": "Why?",
    "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Why?\n\nAssistant:": "Why?",
    "Once upon a time": "Once upon a time", " user of 2 < 3\n": " user of 2 < 3\n", "": "",
    "<|im_start|>assistant\n": "<|im_start|>assistant\n"}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_last_turn_is_what_was_asked(prompt):
    assert last_turn(prompt) == PROMPTS[prompt]


def test_samples_on_the_terminal_and_in_the_report_begin_with_it():
    assert sample_lines({"prompt": CHATML}, 60) == ["    prompt: What is <b>2</b> + 3?"]
    page = html("t", [], [{"prompt": CHATML, "answer": "5"}])
    assert "<summary>What is &lt;b&gt;2&lt;/b&gt;\n+ 3?</summary>&lt;|im_start|&gt;system" in page
