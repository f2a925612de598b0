"""A thought stands where the model's template has it, whatever family's markers the row writes it in."""

from __future__ import annotations

import pytest

from hybrid_rlhf.data.chat import SkipRow, compose_messages, encode_all
from hybrid_rlhf.data.messages import messages_of
from hybrid_rlhf.models.template import dialect_of
from hybrid_rlhf.models.thoughts import thought_of
from tests.factories.releases import transformers_before
from tests.factories.tiny import tiny_tokenizer
from tests.factories.trl_templates import tokenizer_of

ASKED = {"role": "user", "content": "What is one and one?"}
# In the shape of Ministral 3's reasoning template: thoughts are parts of the content.
MINISTRAL = """{{- bos_token }}{%- if messages[0].role != 'system' %}
{{- '[SYSTEM_PROMPT]Think [THINK]first[/THINK] then'
+ ' answer.[/SYSTEM_PROMPT]' }}{%- endif %}{%- for m in messages %}{%- if m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{%- elif m.role == 'user' %}
{{- '[INST]' + m.content + '[/INST]' }}{%- elif m.role == 'assistant' %}{%- if m.content is string %}{{- m.content }}
{%- else %}{%- for part in m.content %}{%- if part.type == 'text' %}{{- part.text }}{%- elif part.type == 'thinking' %}
{{- '[THINK]' + part.thinking + '[/THINK]' }}{%- else %}{{- raise_exception('Only text and thinking') }}{%- endif %}
{%- endfor %}{%- endif %}{{- eos_token }}{%- endif %}{%- endfor %}"""
WAYS = {"think": {"content": "<think>\nAdd one.\n</think>\n\n2."},
        "THINK": {"content": "[THINK]Add one.[/THINK]2."},
        "field": {"content": "2.", "reasoning_content": "Add one."},
        "thinking": {"content": "2.", "thinking": "Add one."},
        "harmony": {"content": "<|channel|>analysis<|message|>Add one.<|end|><|start|>assistant<|channel|>final"
                               "<|message|>2."},
        "parts": {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Add one."}]},
                              {"type": "text", "text": "2."}]}}
# what stands behind the generation prompt of each, by the template's own text; "\n" and "\n\n" are the family's
WRITTEN = {
    "ministral": ("[THINK]Add one.[/THINK]2.</s>", "2.</s>"),
    "gptoss": ("<|channel|>analysis<|message|>Add one.<|end|><|start|>assistant<|channel|>final<|message|>2.<|return|>",
               "<|channel|>final<|message|>2.<|return|>"),
    "gemma4": ("<|channel>thought\nAdd one.\n<channel|>2.<turn|>", "2.<turn|>"),
    "gemma4_v2": ("<|channel>thought\nAdd one.\n<channel|>2.<turn|>", "2.<turn|>"),
    "gemma4_v5": ("<|channel>thought\nAdd one.\n<channel|>2.<turn|>", "2.<turn|>"),
    "qwen3": ("<think>\nAdd one.\n</think>\n\n2.<|im_end|>", "<think>\n\n</think>\n\n2.<|im_end|>"),
    "qwen3_8": ("Add one.\n</think>\n\n2.<|im_end|>", "\n</think>\n\n2.<|im_end|>"),  # its prompt opens the thought
    "glm4moe": ("\n<think>Add one.</think>\n2.<|user|>", "\n<think></think>\n2.<|user|>"),
    "deepseek_r1_distill": ("Add one.\n</think>\n\n2.<｜end▁of▁sentence｜>", "\n</think>\n\n2.<｜end▁of▁sentence｜>")}


def with_template(name: str):
    if name != "ministral":
        return tokenizer_of(name)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]",
                          "[/THINK]"], special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = "<s>", "</s>", MINISTRAL
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return {name: with_template(name) for name in WRITTEN}


def said(tokenizer, **answer) -> str:
    messages = messages_of([ASKED, {"role": "assistant", **answer}], "messages")
    row, = encode_all(tokenizer, compose_messages(tokenizer, messages))
    return tokenizer.decode([i for i, is_trained in zip(row.ids, row.loss_mask, strict=True) if is_trained])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_thought_in_any_family_s_markers_is_trained_as_the_model_writes_one(tokenizers, name, way):
    if way == "thinking" and name in ("qwen3", "glm4moe") and transformers_before("5.23"):
        pytest.skip("those templates know the field reasoning_content alone, and the row is left out with that reason")
    assert said(tokenizers[name], **WAYS[way]) == WRITTEN[name][0]


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("content", ["<think>\n\n</think>\n\n2.", "<think></think>2.", "[THINK][/THINK]2."])
def test_an_empty_thought_is_no_text(tokenizers, name, content):
    wanted = WRITTEN[name][1]
    if name == "glm4moe" or not content.startswith("<think>\n"):  # what the template reads itself it may write anew
        assert said(tokenizers[name], content=content).split("2.")[1] == wanted.split("2.")[1]
    else:
        assert said(tokenizers[name], content=content) == wanted
    assert said(tokenizers[name], content=content).count("<think>") == wanted.count("<think>")


def test_markers_of_one_token_are_that_token_in_what_the_assistant_says(tokenizers):
    tokenizer = tokenizers["ministral"]
    row, = encode_all(tokenizer, compose_messages(tokenizer, [ASKED, {"role": "assistant", **WAYS["THINK"]}]))
    oracle = tokenizer.apply_chat_template([ASKED, {"role": "assistant", **WAYS["THINK"]}], return_dict=False)
    assert row.ids == list(oracle)


def test_a_template_without_thoughts_has_markers_as_the_row_writes_them():
    tokenizer = tokenizer_of("llama3")
    assert dialect_of(tokenizer).thought_marks is None
    assert said(tokenizer, **WAYS["think"]) == f"{WAYS['think']['content']}<|eot_id|>"
    with pytest.raises(SkipRow, match="leaves out what the assistant says"):
        said(tokenizer, **WAYS["field"])


def test_a_marker_without_its_end_or_behind_the_beginning_is_no_thought():
    for content in ("<think>Add one.", "2. <think>Add one.</think>", "</think>2.", "[THINK]Add one.</think>2."):
        assert thought_of({"content": content}) == ("", content)


def test_an_answer_that_names_the_end_of_a_thought_is_not_part_of_one():
    tokenizer = tokenizer_of("nemotron_3_nano")
    said = "Write </think> behind it."
    rows = [compose_messages(tokenizer, [ASKED, {"role": "assistant", "content": said, **thought}])[0]
            for thought in ({}, {"reasoning_content": "So."})]
    texts = [row.text[slice(*row.spans[0])] for row in rows]
    assert texts == [f"\n</think>\n{said}<|im_end|>", f"So.\n</think>\n{said}<|im_end|>"]
