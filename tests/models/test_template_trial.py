"""Chat templates of strangers: what takes too long, writes too much or fails ends in one line, never in the process."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.models import template_trial
from tests.factories.tiny import tiny_tokenizer


@pytest.mark.parametrize(("template", "words"), [
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}"
     "{% endfor %}", "takes more than 1 seconds"),
    ("{{ 10 ** (10 ** 9) }}", "takes more than 1 seconds"),  # as it is compiled
    ("{% set x = [0] * 10**9 %}{{ x | length }}", "takes more than 1024 MiB"),
    ("{{ 'a' * 10**7 }}", "writes 10,000,000"),
    ("{% if tools %}{{ 'a' * 10**7 }}{% endif %}{{ messages[0].content }}", "writes 10,000,004")], ids=range(5))
def test_a_template_out_of_bounds_is_one_line_in_seconds(template, words, monkeypatch):
    monkeypatch.setattr("hybrid_rlhf.models.template_trial.SECONDS", 1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    start = time.monotonic()
    with pytest.raises(UserError, match=f"^the chat template {words}"):
        chat.encode_prompt(tokenizer, [{"role": "user", "content": "a"}])
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("template", [
    "{{ 1 / 0 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 10 ** 'a' }}", "{% for", "{% include 'x' %}",
    "{{ ''.__class__.__mro__ }}", "{{ range(10**9) | list }}", "{{ '%d' % 'x' }}",
    "{{ raise_exception('a' * 10**5) }}"])
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


@pytest.mark.parametrize("code", ["import os; raise OSError('no such')", "print('no result')", "raise SystemExit(3)"])
def test_a_trial_that_fails_by_itself_ends_no_run(monkeypatch, caplog, code):
    monkeypatch.setattr(template_trial, "_SCRIPT", code)
    template_trial.check_template(f"{{# {code} #}}", (), "[]")
    assert "the chat template is used untried" in caplog.text
    monkeypatch.setattr("sys.executable", "/no/such/python")
    template_trial.check_template(f"{{# again {code} #}}", (), "[]")
    assert "no process for its trial (No such file or directory)" in caplog.text


def test_a_trial_reads_a_path_that_holds_more_than_text_and_output_that_others_begin(monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path, Path("/no/such")])
    monkeypatch.setattr(template_trial, "_SCRIPT", "print('hello', end='')" + template_trial._SCRIPT)
    monkeypatch.setattr(template_trial, "CHARACTERS", 3)
    with pytest.raises(UserError, match="writes 4 characters"):
        template_trial.check_template("four", (), '[{"messages": []}]')


def test_a_trial_that_is_killed_is_told_as_that(monkeypatch):
    monkeypatch.setattr(template_trial, "_SCRIPT", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(UserError, match=r"was killed \(memory or time\)"):
        template_trial.check_template("killed", (), "[]")
