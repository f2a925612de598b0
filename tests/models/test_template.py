"""Chat templates: strangers' ones are tried first; what a template writes around an answer is no part of its text."""

from __future__ import annotations

import json
import time

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.inference.response_text import AnswerText, pieces
from hybrid_rlhf.models import template_trial
from hybrid_rlhf.models.tokenizer import completion_text
from tests.factories.tiny import chatml_tokenizer, tiny_tokenizer
from tests.factories.trl_templates import tokenizer_of


@pytest.mark.parametrize(("template", "words"), [
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
     "{% endfor %}", "takes more than 1 seconds"),
    ("{% set x = [0] * 10**9 %}{{ x | length }}", "takes more than 1024 MiB"),
    ("{{ 'a' * 10**7 }}", "writes 10,000,000")], ids=range(3))
def test_a_template_out_of_bounds_is_one_line_in_seconds(template, words, monkeypatch):
    monkeypatch.setattr("hybrid_rlhf.models.template_trial.SECONDS", 1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    start = time.monotonic()
    with pytest.raises(UserError, match=f"^the chat template {words}"):
        chat.encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("template", [
    "{{ 1 / 0 }}", "{% for", "{% include 'x' %}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('a' * 10**5) }}"])
def test_a_template_that_fails_is_a_reason_to_drop_a_row(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(chat.SkipRow, match="the chat template refuses it") as caught:
        chat.encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
    assert len(str(caught.value)) < 300


def test_a_template_is_tried_once_and_then_renders_as_fast_as_before(monkeypatch):
    runs, run = [], template_trial.subprocess.run
    monkeypatch.setattr(template_trial.subprocess, "run", lambda *a, **named: (runs.append(1), run(*a, **named))[1])
    for _ in range(2):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = chat.CHATML + "{# once #}"
        for i in range(100):
            chat.encode_prompt(tokenizer, [{"role": "user", "content": f"a{i}"}])
    assert len(runs) == 1


def test_a_trial_that_fails_by_itself_ends_no_run(monkeypatch, caplog):
    monkeypatch.setattr(template_trial, "_SCRIPT", "print('no result')")
    template_trial.check_template("{# no result #}", (), "[]")
    monkeypatch.setattr("sys.executable", "/no/such/python")
    template_trial.check_template("{# no process #}", (), "[]")
    assert caplog.text.count("the chat template is used untried") == 2


def test_the_trial_knows_what_transformers_gives_to_a_template():
    """A template that uses all of it is not refused, and renders in both."""
    template = ("{{ bos_token }}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
                "{{ m.content | tojson }}{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{% endfor %}")
    messages = [{"role": "user", "content": "é"}]
    wanted = json.dumps([{"messages": messages, "tools": None, "add_generation_prompt": True}])
    given, characters = (("bos_token", "<s>"),), template_trial.CHARACTERS
    template_trial.check_template(template, given, wanted)
    try:
        template_trial.CHARACTERS = 9  # <s>"é"2026 has 10
        with pytest.raises(UserError, match="writes 10 characters"):
            template_trial.check_template(template + "{##}", given, wanted)
    finally:
        template_trial.CHARACTERS = characters


# -- What reward functions, judges and people read of a response: its text without the tokens that end it --------------


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
