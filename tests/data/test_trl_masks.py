"""Tool conversations token by token against TRL's own masks: its templates for training mark what the assistant says.

TRL has no such template for Llama 3.1; its marks are set here, into the template as it is.
"""

from __future__ import annotations

import pytest

from hybrid_rlhf.data.chat import SkipRow, compose_all, compose_messages, encode_all
from tests.factories.trl_templates import CONVERSATIONS, TOOLS, names, template_of, tokenizer_of

SAID = "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}"
MARKED_SAID = ("'<|end_header_id|>\\n\\n' }}{%- if message['role'] == 'assistant' %}{%- generation %}"
               "{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}{%- else %}"
               "{{- message['content'] | trim + '<|eot_id|>' }}{%- endif %}")
CALL_BEGINS, CALL_ENDS = """{{- '{"name": "' + tool_call.name""", """{{- "}" }}"""
END = """        {%- if builtin_tools is defined %}
            {#- This means we're in ipython mode #}
            {{- "<|eom_id|>" }}
        {%- else %}
            {{- "<|eot_id|>" }}
        {%- endif %}
"""
MARKED_END = """        {%- generation %}{{- "<|eot_id|>" }}{%- endgeneration %}
"""


def llama_marked() -> str:
    text = template_of("llama3_1")
    for old, new in ((SAID, MARKED_SAID), (CALL_BEGINS, "{%- generation %}" + CALL_BEGINS),
                     (CALL_ENDS, CALL_ENDS + "{%- endgeneration %}"), (END, MARKED_END)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


# name -> template with marks, template that we are given, whether its marks begin and end with a newline that nobody
# says: it stands in the prompt of a rollout, and behind the token that ends one
CASES = {"qwen2_5": (lambda: template_of("qwen2_5_training"), "qwen2_5", True, True),
         "qwen3": (lambda: template_of("qwen3_training"), "qwen3_training", False, True),
         "llama3_1": (llama_marked, "llama3_1", False, False)}


def call(city: str, **more) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "weather_of", "arguments": {"city": city}}}], **more}


def result(text: str) -> dict:
    return {"role": "tool", "name": "weather_of", "content": text}


PLAIN = [{"role": "user", "content": "How warm is it?"}, call("Oslo"), result("7 degrees"),
         {"role": "assistant", "content": "It is cold."}, {"role": "user", "content": "And in Rome, and Bonn?"},
         call("Rome"), result("31 degrees"), call("Bonn"), result('{"degrees": 12}'),
         {"role": "assistant", "content": "Rome is hot."}]
PARALLEL = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Rome and Bonn?"},
            {**call("Rome", content="I look."), "tool_calls": call("Rome")["tool_calls"] + call("Bonn")["tool_calls"]},
            result("31 degrees"), result("12 degrees"), {"role": "assistant", "content": "Rome is hot."}]
THOUGHT = [PLAIN[0], call("Oslo", reasoning_content="I must look."), result("7 degrees"),
           {"role": "assistant", "content": "It is cold.", "reasoning_content": "Seven is cold."}]


def theirs(tokenizer, template: str, messages: list[dict], **edges: bool) -> tuple[list[int], list[int]]:
    """ids, and the places that TRL trains (assistant_only_loss), without newlines at the edges of its marks."""
    found = tokenizer.apply_chat_template(messages, tools=TOOLS, chat_template=template, return_dict=True,
                                          return_assistant_tokens_mask=True)
    ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
    begins = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    ends = [i for i in range(len(mask)) if mask[i] and not (i + 1 < len(mask) and mask[i + 1])]
    for place in [*(begins if edges["begin"] else ()), *(ends if edges["end"] else ())]:
        assert tokenizer.decode([ids[place]]) == "\n"
        mask[place] = 0
    return ids, [i for i, is_trained in enumerate(mask) if is_trained]


def with_tools(messages: list[dict]) -> list[dict]:
    return [{**messages[0], "tools": TOOLS}, *messages[1:]]


@pytest.mark.parametrize(("name", "messages"), [
    ("qwen2_5", PLAIN), ("qwen2_5", PARALLEL), ("qwen3", PLAIN), ("qwen3", PARALLEL), ("qwen3", THOUGHT),
    ("llama3_1", PLAIN)])
@pytest.mark.parametrize("num_prompt", [None, 1, 3])
def test_tokens_and_what_is_trained_are_those_of_trl(name, messages, num_prompt):
    marked, given, begin, end = CASES[name]
    tokenizer = tokenizer_of(given)
    ids, places = theirs(tokenizer, marked(), messages, begin=begin, end=end)
    if num_prompt is None:
        ours = encode_all(tokenizer, compose_messages(tokenizer, with_tools(messages)))
    else:  # prompt and completion: what stands in the prompt is not trained
        num_prompt += messages[0]["role"] == "system"
        prompt = tokenizer.apply_chat_template(messages[:num_prompt], tools=TOOLS, add_generation_prompt=True)
        places = [i for i in places if i >= len(prompt["input_ids"])]
        ours = encode_all(tokenizer, compose_all(tokenizer, with_tools(messages[:num_prompt]), messages[num_prompt:]))
    assert len(ours) == 1
    assert ours[0].ids == ids[: len(ours[0].ids)] and tokenizer.decode(ids[len(ours[0].ids) :]).strip() == ""
    assert [i for i, is_trained in enumerate(ours[0].loss_mask) if is_trained] == places
    said = tokenizer.decode([ids[i] for i in places])
    assert ("weather_of" in said) == any(m.get("tool_calls") for m in messages[num_prompt or 0 :])
    assert "degrees" not in said and "kind" not in said and "warm" not in said


def test_the_marks_change_nothing_of_llama_s_template():
    tokenizer = tokenizer_of("llama3_1")
    rendered = [tokenizer.apply_chat_template(PLAIN, tools=TOOLS, chat_template=template, tokenize=False)
                for template in (template_of("llama3_1"), llama_marked())]
    assert rendered[0] == rendered[1]


# Where our tokens are not those of TRL's template for training, and why:
OURS_BY_DECISION = {
    "deepseek": "the prompt opens a thought that TRL's template does not write",
    "nemotron": "the prompt opens a thought that TRL's template does not write",
    "qwen3": "earlier turns are rewritten: a row for each answer, behind the prompt that generation sees",
    "gptoss": "a thought in the content goes into the field that the template has for it",
    "muse": "a thought in the content goes into the field that the template has for it",
    "diffusion_gemma": "a thought in the content goes into the field that the template has for it",
    "qwen3_8": "a thought in the content goes into the field that the template has for it"}
ONLY_THOUGHTS = ("gptoss", "muse", "diffusion_gemma", "qwen3_8")
FEW = {"one turn": CONVERSATIONS["one turn"], "three turns": CONVERSATIONS["three turns"],
       "thoughts": CONVERSATIONS["thoughts"]}


@pytest.mark.parametrize("name", names(training=True))
@pytest.mark.parametrize("kind", FEW)
def test_every_template_for_training_of_trl_trains_what_we_do_but_for_what_is_decided(name, kind):
    """What TRL trains beside: white space and an end of text behind a turn, which no rollout has; what the generation
    prompt says already; answers of a rewritten history, each of which has its own row here."""
    tokenizer, messages = tokenizer_of(name.removesuffix("_training")), FEW[kind]
    if (name, kind) == ("qwen3_5_nothink_training", "thoughts"):
        with pytest.raises(SkipRow, match="ends the thought"):
            compose_messages(tokenizer, messages)
        return
    rows = encode_all(tokenizer, compose_messages(tokenizer, messages))
    given = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages] \
        if name.startswith(("smolvlm", "idefics3", "llava")) else messages
    found = tokenizer.apply_chat_template(given, chat_template=template_of(name), return_dict=True,
                                          return_assistant_tokens_mask=True)
    ids, mask, row = list(found["input_ids"]), list(found["assistant_masks"]), rows[-1]
    if ids[: len(row.ids)] != row.ids:
        assert name.startswith(tuple(OURS_BY_DECISION))
        assert kind == "thoughts" or not name.startswith(ONLY_THOUGHTS)
        return
    trained = {i for i, is_trained in enumerate(row.loss_mask) if is_trained}
    theirs = {i for i, is_trained in enumerate(mask) if is_trained}
    assert trained <= theirs
    first = min(trained) if len(rows) > 1 else 0  # what lies before belongs to the rows of the answers before
    rest = tokenizer.decode([ids[i] for i in sorted(theirs - trained) if i >= first])
    for word in ("<|endoftext|>", "<|start|>assistant", "<think>", "</think>"):
        rest = rest.replace(word, "")
    assert rest.strip() == ""
