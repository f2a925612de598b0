"""Variables of a chat template: of all rows, of one row, of an episode; and those that a template does not read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data import cache
from hybrid_rlhf.data.added_turns import added_tokens
from hybrid_rlhf.data.chat import encode_prompt, ensure_template
from hybrid_rlhf.data.datasets import DataConfig, build
from hybrid_rlhf.data.sources import Reads
from hybrid_rlhf.models import template
from hybrid_rlhf.models.template_kwargs import _literal, names_read
from tests.factories.tiny import chatml_tokenizer
from tests.factories.trl_templates import template_of, tokenizer_of

ASKED = [{"role": "user", "content": "What is red?"}]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def qwen():
    return tokenizer_of("qwen3")


def by_transformers(tokenizer, messages=ASKED, **kwargs) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **kwargs))


@pytest.mark.parametrize(("name", "kwargs"), [
    ("qwen3", OFF), ("glm4moe", OFF), ("gptoss", {"reasoning_effort": "low"}), ("gemma4", {"enable_thinking": True}),
    ("qwen3_5_think", OFF), ("nemotron_3_nano", OFF)])
def test_values_for_all_rows_are_the_template_s_defaults_and_those_of_a_conversation_go_before(name, kwargs):
    plain, tokenizer = tokenizer_of(name), tokenizer_of(name)
    ensure_template(tokenizer, kwargs=kwargs)
    wanted = by_transformers(plain, **kwargs)
    assert wanted != by_transformers(plain)
    assert encode_prompt(tokenizer, ASKED) == by_transformers(tokenizer) == wanted
    once = tokenizer.chat_template
    ensure_template(tokenizer, kwargs=kwargs)
    assert tokenizer.chat_template == once  # a later stage finds them set
    other = {key: "high" if value == "low" else not value for key, value in kwargs.items()}
    beside = [{**ASKED[0], "chat_template_kwargs": other}]
    assert encode_prompt(tokenizer, beside) == by_transformers(plain, **other)
    assert encode_prompt(plain, [{**ASKED[0], "chat_template_kwargs": kwargs}]) == wanted


def test_a_variable_that_the_template_does_not_read_is_refused_by_name():
    with pytest.raises(UserError, match=r"data.chat_template_kwargs: .* does not read enable_thinkin.*enable_thinking"):
        ensure_template(tokenizer_of("qwen3"), kwargs={"enable_thinkin": False})
    with pytest.raises(UserError, match="does not read enable_thinking; it reads no variable"):
        ensure_template(chatml_tokenizer(), kwargs=OFF)
    for name in ("messages", "tokenize", "bos_token", "add_generation_prompt"):
        with pytest.raises(UserError, match=f"does not read {name}"):
            ensure_template(tokenizer_of("qwen3"), kwargs={name: True})
    for value in ([1], "enable_thinking", {"a b": 1}):
        with pytest.raises(UserError, match="must be a mapping of a chat template's variables"):
            DataConfig(chat_template_kwargs=value)


def test_the_variables_that_a_template_reads_are_found_in_its_text():
    assert names_read(template_of("qwen3")) == {"enable_thinking"}
    assert "reasoning_effort" in names_read(template_of("gptoss_training"))  # has blocks of transformers' own
    text = "{%- set a = a | default(1) %}{% if b is defined %}{{ a }}{% endif %}{{ messages }}"
    assert names_read(text) == {"a", "b"}


JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6) | st.just("%}{{ x }}"),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2))


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_a_value_is_written_into_a_template_as_what_it_is(value):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    kept = []
    environment = ImmutableSandboxedEnvironment()
    environment.globals["keep"] = kept.append
    environment.from_string(f"{{%- set a = a | default({_literal(value)}) %}}{{{{ keep(a) }}}}").render()
    assert kept == [value]


def rows(tmp_path, tokenizer, kind: str, *given: dict):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    config = DataConfig(str(path), eval_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    stage = {"prompt": "ppo", "pair": "reward", "demonstration": "sft"}[kind]
    return build(config, Reads(stage, kind, 0), tokenizer, seed=0)


@pytest.mark.parametrize("prompt", ["What is red?", ASKED])
def test_a_row_s_own_variables_are_read_in_every_kind_of_stage(tmp_path, qwen, prompt):
    wanted = by_transformers(qwen, **OFF)
    answer = "A fox." if isinstance(prompt, str) else [{"role": "assistant", "content": "A fox."}]
    row = {"prompt": prompt, "completion": answer, "chosen": answer, "rejected": "No." if answer == "A fox." else [
        {"role": "assistant", "content": "No."}], "chat_template_kwargs": OFF}

    def of(kind: str, *columns: str):
        return rows(tmp_path, qwen, kind, {name: row[name] for name in (*columns, "chat_template_kwargs")})

    sampled = of("prompt", "prompt").train[0]
    assert sampled["prompt_ids"] == wanted
    again = sampled["prompt"]  # an environment writes the prompt anew
    assert encode_prompt(qwen, again) == wanted
    assert of("demonstration", "prompt", "completion").train[0]["input_ids"][: len(wanted)] == wanted
    pair = of("pair", "prompt", "chosen", "rejected").train[0]
    assert pair["chosen_ids"][: len(wanted)] == pair["rejected_ids"][: len(wanted)] == wanted


def test_rows_of_messages_have_variables_too_and_json_text_of_them_is_read(tmp_path, qwen):
    messages = [*ASKED, {"role": "assistant", "content": "A fox."}]
    wanted = by_transformers(qwen, **OFF)
    for value in (OFF, json.dumps(OFF), {**OFF, "other": None}):
        data = rows(tmp_path, qwen, "demonstration", {"messages": messages, "chat_template_kwargs": value})
        assert data.train[0]["input_ids"][: len(wanted)] == wanted


def test_the_next_turn_of_an_episode_has_the_variables_of_its_prompt(qwen):
    ids = added_tokens(qwen, {"role": "assistant", "content": "A fox."}, ASKED, True, OFF)
    assert qwen.decode(ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tables_are_made_anew_when_code_that_templates_are_rendered_by_changes():
    file = Path(template.__file__)
    names = re.findall(r"^from hybrid_rlhf\.models\.(\w+) import", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) > 2
    for name in ("template", *names):
        assert file.with_name(f"{name}.py").read_text(encoding="utf-8") in cache._code()
