"""Sampled turns read back: by every template of TRL that shows calls, what models really write, and what is wrong."""

from __future__ import annotations

import functools
import json
import time
from functools import cache
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data.turns import render
from hybrid_rlhf.models.template import dialect_of
from hybrid_rlhf.models.tool_calls import check_tools, parse_turn
from hybrid_rlhf.models.tool_schema import schema_of
from tests.factories.tiny import chatml_tokenizer, tiny_tokenizer
from tests.factories.trl_templates import names, tokenizer_of

WITHOUT = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2", "llama3",
           "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"}
SHOWING = [n for n in [*names(), *names(training=True)] if n.removesuffix("_training") not in WITHOUT - {"deepseekv3"}]
SINGLE = {"gptoss", "llama3_1", "llama3_2"}  # one call a turn
MISTRAL = ("{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
           '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments|tojson }}, "id": "{{ c.id }}"}'
           "{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'user' %}[INST]{{ tools }}{{ m.content }}"
           "[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}")
NAMED = ("{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
         "[ARGS]{{ c.function.arguments|tojson }}{% endfor %}</s>{% elif m.role == 'user' %}[INST]{{ tools }}"
         "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}")
PHI4 = ("{% for m in messages %}<|{{ m.role }}|>{{ tools if tools and m.role == 'user' }}{{ m.content }}"
        "{% if m.tool_calls %}<|tool_call|>[{% for c in m.tool_calls %}"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments}|tojson }}{{ ', ' if not loop.last }}"
        "{% endfor %}]<|/tool_call|>{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
WRITTEN = {"mistral": MISTRAL, "mistral_named": NAMED, "phi4": PHI4}


def schema(name: str, **types: str) -> dict:
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": {
        "type": "object", "properties": {k: {"type": t, "description": "It."} for k, t in types.items()}}}}


TOOLS = [schema("weather_of", city="string", days="integer", metric="boolean", near="object", scale="number"),
         schema("time_of", zone="string"), schema("now")]
WEATHER = {"city": 'Oslo, "Grünerløkka"', "days": 3, "metric": True, "near": {"km": [1, 2.5], "of": "x"}, "scale": 0.5}


@cache
def tokenizer(name: str):
    if name not in WRITTEN:
        return tokenizer_of(name)
    found = tiny_tokenizer()
    found.add_tokens(["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "</s>"], special_tokens=True)
    found.eos_token, found.chat_template = "</s>", WRITTEN[name]
    return found


def call(name: str, **arguments) -> dict:
    return {"type": "function", "id": "abcde1234", "function": {"name": name, "arguments": arguments}}


def said_by(name: str, message: dict) -> tuple[list[int], str]:
    """(the tokens that the template writes for a turn behind its generation prompt, the end of that prompt)."""
    asked, found = {"role": "user", "content": "How warm?"}, tokenizer(name)
    if dialect_of(found).arguments_as_text and "tool_calls" in message:
        message = {**message, "tool_calls": [{**c, "function": {**c["function"], "arguments": json.dumps(
            c["function"]["arguments"], ensure_ascii=False)}} for c in message["tool_calls"]]}
    before, text = (found.apply_chat_template(talk, tools=TOOLS, tokenize=False, add_generation_prompt=is_prompt)
                    for talk, is_prompt in (([asked], True), ([asked, message], False)))
    if not text.startswith(before):  # the prompt opens a thought, and this turn has none
        before = before[: before.rindex("<think>")]
        assert text.startswith(before)
    return found(text[len(before) :].rstrip(), add_special_tokens=False)["input_ids"], before[-40:]


def parsed(name: str, message: dict, tools: list[dict] = TOOLS):
    """The turn that the template writes, tokenized and read back."""
    ids, prefix = said_by(name, message)
    return parse_turn(tokenizer(name), ids, tools, prefix)


def functions(message: dict) -> list[dict]:
    assert all(c["type"] == "function" for c in message.get("tool_calls", ()))
    return [c["function"] for c in message.get("tool_calls", ())]


def read(name: str, text: str, prefix: str = ""):
    return parse_turn(tokenizer(name), tokenizer(name)(text, add_special_tokens=False)["input_ids"], TOOLS, prefix)


def thinking(name: str, content: str, thought: str) -> dict:
    field = dialect_of(tokenizer(name)).thought_field
    apart = {field: thought} if field else {}
    return {"role": "assistant", "content": content if field else f"<think>\n{thought}\n</think>\n\n{content}", **apart}


@pytest.mark.parametrize("name", [*SHOWING, *WRITTEN])
@pytest.mark.parametrize("calls", [[call("weather_of", **WEATHER)], [call("now")],
                                   [call("weather_of", city="Oslo"), call("time_of", zone="CET"), call("now")]])
def test_a_call_that_the_template_writes_is_read_back(name, calls):
    if len(calls) > 1 and name.removesuffix("_training") in SINGLE:
        calls = calls[:1]
    found = parsed(name, {"role": "assistant", "content": "", "tool_calls": calls})
    assert functions(found.message) == [c["function"] for c in calls] and found.errors == []
    assert found.message["content"] == "" and "reasoning_content" not in found.message


@pytest.mark.parametrize("name", [n for n in SHOWING if n.removesuffix("_training") not in SINGLE | {"muse_glimmer"}])
def test_text_before_a_call_is_the_content(name):
    message = {"role": "assistant", "content": "I look it up.", "tool_calls": [call("time_of", zone="CET")]}
    found = parsed(name, message)
    assert functions(found.message) == [{"name": "time_of", "arguments": {"zone": "CET"}}]
    assert found.message["content"] == "I look it up."


@pytest.mark.parametrize("name", [n for n in SHOWING if not n.startswith(("gemma4", "llama3", "qwen3_5_nothink"))
                                  or n == "gemma4_v5"])
@pytest.mark.parametrize("calls", [[call("time_of", zone="CET")], []])
def test_a_thought_is_apart(name, calls):
    if name.startswith("deepseekv3") and not calls:
        pytest.skip("the template removes it")
    message = thinking(name, "" if calls else "It is cold.", "So it is.") | ({"tool_calls": calls} if calls else {})
    found = parsed(name, message).message
    assert functions(found) == [c["function"] for c in calls]
    assert (found["reasoning_content"], found["content"]) == ("So it is.", "" if calls else "It is cold.")


@pytest.mark.parametrize("name", [*SHOWING, *WRITTEN])
def test_a_turn_without_a_call_is_its_text_without_the_end(name):
    found = parsed(name, {"role": "assistant", "content": "It is {cold}: <b>[1]."})
    assert found == ({"role": "assistant", "content": "It is {cold}: <b>[1]."}, [])


@pytest.mark.parametrize("name", names())
def test_templates_without_tools_are_refused_and_the_others_are_not(name):
    if name not in WITHOUT:
        check_tools(tokenizer(name))
        return
    with pytest.raises(UserError, match=r"the chat template leaves out .*; give data.chat_template"):
        check_tools(tokenizer(name))


LETTERS = st.characters(exclude_categories=("Cs", "Cc"))
HOSTILE = st.sampled_from(["</tool_call>", "<tool_call>", '{"name": "f", "parameters": {', "[TOOL_CALLS]", "[ARGS]",
                           "]", "</think>", "<think>", "<|call|>", "<|eot_id|>", "<|im_end|>", "<｜tool▁call▁end｜>",
                           "\\", '"', "'", "\n", "; {", "\\u0041", "<|/tool_call|>", "\x01\x02", "to=functions.f"])
WORDS = st.lists(st.one_of(st.text(LETTERS, max_size=8), HOSTILE), max_size=4).map("".join)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, WORDS),
                      lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
                      max_leaves=8)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gptoss", "deepseekv3", "mistral", "mistral_named",
                                  "phi4"])
@settings(max_examples=60, deadline=None)
@given(arguments=st.dictionaries(WORDS, VALUES, max_size=3))
def test_any_arguments_come_back_from_formats_in_json(name, arguments):
    message = {"role": "assistant", "content": "", "tool_calls": [call("f") | {
        "function": {"name": "f", "arguments": arguments}}]}
    found = parsed(name, message, [])
    assert found.errors == [] and functions(found.message) == [{"name": "f", "arguments": arguments}]


PIECES = st.sampled_from(["<tool_call>", '{"name": "f"', '"arguments": {', "}", "}}", "</tool_call>", "<function=f>",
                          "<parameter=a>", "<|tool_call_start|>[", "f(a=1)"])
PLAIN = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<>"), max_size=12)
NESTED = st.dictionaries(PLAIN, st.one_of(st.integers(), st.none(), st.booleans(), st.lists(PLAIN, max_size=2)),
                         max_size=3)


@pytest.mark.parametrize("name", ["qwen3_6", "qwen3_8", "nemotron_3_nano", "glm4moe", "muse_glimmer"])
@settings(max_examples=60, deadline=None)
@given(city=PLAIN.map(lambda s: s.replace("/", "\n\n")), days=st.integers(), metric=st.booleans(), near=NESTED,
       scale=FLOATS)
def test_any_arguments_come_back_from_formats_in_tags_by_the_schema_of_the_tool(name, city, days, metric, near, scale):
    arguments = {"city": city, "days": days, "metric": metric, "near": near, "scale": scale}
    message = {"role": "assistant", "content": "", "tool_calls": [call("weather_of", **arguments)]}
    found = parsed(name, message)
    assert found.errors == [] and functions(found.message) == [{"name": "weather_of", "arguments": arguments}]


@pytest.mark.parametrize("name", ["lfm2_v2", "lfm2_2_5_vl"])
@settings(max_examples=60, deadline=None)
@given(city=st.one_of(PLAIN, st.just("it's \\ \"so\"\n")), days=st.integers(), metric=st.booleans(), near=NESTED)
def test_any_arguments_come_back_from_calls_in_python(name, city, days, metric, near):
    arguments = {"city": city, "days": days, "metric": metric, "near": near}
    message = {"role": "assistant", "content": "", "tool_calls": [call("weather_of", **arguments)]}
    found = parsed(name, message)
    assert found.errors == [] and functions(found.message) == [{"name": "weather_of", "arguments": arguments}]


@settings(max_examples=80, deadline=None)
@given(text=st.lists(st.one_of(WORDS, HOSTILE, PIECES), max_size=12).map("".join),
       name=st.sampled_from(["qwen2_5", "llama3_1", "qwen3_6", "lfm2_v2", "gptoss", "gemma4", "mistral",
                             "mistral_named", "glm4moe"]))
def test_whatever_is_said_is_a_message_with_calls_or_with_errors_in_one_line(name, text):
    found = read(name, text)
    assert found.message["role"] == "assistant" and isinstance(found.message["content"], str)
    assert not (found.errors and "tool_calls" in found.message)
    assert all("\n" not in line and 0 < len(line) <= 600 for line in found.errors)
    for function in functions(found.message):
        assert isinstance(function["name"], str) and isinstance(function["arguments"], dict)


HERMES = '<tool_call>\n{"name": "time_of", "arguments": {"zone": "CET"}}\n</tool_call>'
MALFORMED = {
    '<tool_call>\n{"name": "time_of", "arguments": {"zone": CET}}\n</tool_call>': "JSON is wrong (Expecting value at",
    '<tool_call>\n{"arguments": {"zone": "CET"}}\n</tool_call>': "names no function",
    '<tool_call>\n{"name": "time_of", "arguments": "CET"}\n</tool_call>': "arguments are not an object",
    '<tool_call>\n{"name": "time_of", "arguments": {"zone": "CET"}}': "has no end",
    '<tool_call>\n"time_of"\n</tool_call>': "not a JSON object",
    "<tool_call>" + "[" * 100_000 + "</tool_call>": "nested too deeply",
}


@pytest.mark.parametrize("text", MALFORMED)
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_a_malformed_call_is_one_line_and_the_text_is_kept_as_it_was_said(text, end):
    found = read("qwen2_5", f"<think>\nHm.\n</think>\n\nI look.\n{text}{end}")
    assert found.message == {"role": "assistant", "reasoning_content": "Hm.", "content": f"I look.\n{text}"}
    (line,) = found.errors
    assert MALFORMED[text] in line and "\n" not in line
    assert line.endswith('; a call is written <tool_call>{"name": ..., "arguments": {...}}</tool_call>')


def test_each_malformed_call_has_its_line_and_none_of_the_turn_is_made():
    text = f'{HERMES}\n<tool_call>\n{{"name": }}\n</tool_call>\n<tool_call>\n{{"arguments": {{}}}}\n</tool_call>'
    found = read("qwen2_5", f"<think>\nA <tool_call> maybe.\n</think>\n\n{text}<|im_end|>")
    assert [("JSON" in line, "names no" in line) for line in found.errors] == [(True, False), (False, True)]
    assert found.message == {"role": "assistant", "reasoning_content": "A <tool_call> maybe.", "content": text}


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("qwen3_6", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "does not go on as a call"),
    ("qwen3_6", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</function>\n</tool_call>", "is not an argument"),
    ("glm4moe", "<tool_call>now\n<arg_key>a</arg_key>\n</tool_call>", "is not an argument"),
    ("lfm2_v2", "<|tool_call_start|>[now(1)]<|tool_call_end|>", "each argument needs its name"),
    ("lfm2_v2", "<|tool_call_start|>[now(a=open('x'))]<|tool_call_end|>", "open('x') is not a plain value"),
    ("llama3_1", '{"name": "now", "parameters": 1}', "its parameters are not an object"),
    ("gptoss", "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{<|call|>", "JSON is wrong"),
    ("gptoss", " to=functions.now {}<|call|>", "does not go on as a call"),
    ("gemma4", "<|tool_call>call:now{a:<tool_call|><|tool_response>", "cannot be read"),
    ("mistral", '[TOOL_CALLS][{"name": "now"]</s>', "JSON is wrong"),
    ("mistral_named", "[TOOL_CALLS]now{}</s>", "does not go on as a call"),
])
def test_malformed_calls_of_other_formats(name, text, reason):
    found = read(name, text)
    (line,) = found.errors
    assert reason in line and "; a call is written " in line
    assert "tool_calls" not in found.message and found.message["content"].startswith(text[:14].strip())


def test_what_models_write_and_templates_do_not():
    gpt_oss = ("<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
               "<|end|><|start|>assistant<|channel|>commentary to=functions.time_of <|constrain|>json<|message|>"
               '{"zone": "CET"}<|call|>')
    time_of = {"name": "time_of", "arguments": {"zone": "CET"}}
    found = read("gptoss", gpt_oss).message
    assert (found["reasoning_content"], found["content"], functions(found)) == ("Need it.", "I look.", [time_of])
    for name, text in {
        "llama3_1": '<|python_tag|>{"name": "time_of", "parameters": {"zone": "CET"}}<|eot_id|>',
        "llama3_2": '{"type": "function", "name": "time_of", "parameters": {"zone": "CET"}}<|eot_id|>',
        "deepseekv3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time_of<｜tool▁sep｜>{"zone": "CET"}'
                      "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        "qwen2_5": '<tool_call>[{"name": "time_of", "arguments": {"zone": "CET"}}]</tool_call>',
        "qwen3_6": "<tool_call><function=time_of><parameter=zone>CET</parameter></function></tool_call>",
        "mistral_named": '[TOOL_CALLS]time_of[CALL_ID]abcde1234[ARGS]{"zone": "CET"}</s>',
        "mistral": '[TOOL_CALLS] [{"name": "time_of", "arguments": {"zone": "CET"}, "id": "abcde1234"}]</s>',
        "lfm2_v2": '<|tool_call_start|>[time_of(zone="CET")]<|tool_call_end|><|im_end|>',
    }.items():
        found = read(name, text).message
        assert functions(found) == [time_of] and found["content"] == ""
        assert [c.get("id") for c in found["tool_calls"]] == ["abcde1234" if "abcde1234" in text else None]
    two = read("llama3_1", '{"name": "now", "parameters": {}}; {"name": "time_of", "parameters": {"zone": "CET"}}')
    assert functions(two.message) == [{"name": "now", "arguments": {}}, time_of]


def test_a_prompt_may_open_the_thought_and_a_turn_may_never_end_it():
    prefix = "user\nHi <tool_call>{}</tool_call><|im_end|>\n<|im_start|>assistant\n<think>\n"
    found = read("qwen3_6", "Hm.\n</think>\n\n7<|im_end|>", prefix)
    assert found == ({"role": "assistant", "content": "7", "reasoning_content": "Hm."}, [])
    found = read("qwen3_6", "Hm. <tool_call> 7", prefix)
    assert found == ({"role": "assistant", "content": "", "reasoning_content": "Hm. <tool_call> 7"}, [])
    assert read("qwen3_6", "7", "<think>\n\n</think>\n\n").message == {"role": "assistant", "content": "7"}
    assert read("qwen3_6", "I <think> so.").message == {"role": "assistant", "content": "I <think> so."}


def test_a_tokenizers_own_response_template_is_read_first():
    own = tokenizer_of("qwen2_5")
    own.response_template = {"start_anchor": "<|im_start|>assistant\n", "fields": {
        "thinking": {"open": "<hm>", "close": "</hm>", "content": "text"},
        "tool_calls": {"open_pattern": r"CALL (?P<name>\w+) ", "close": ";", "content": "json", "repeats": True,
                       "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}},
        "content": {"close": "<|im_end|>", "content": "text"}}}

    def turn(text: str):
        prefix = "<|im_start|>user\nCALL now {};<|im_end|>\n<|im_start|>assistant\n"
        return parse_turn(own, own(text, add_special_tokens=False)["input_ids"], TOOLS, prefix)

    found = turn('<hm>So.</hm>CALL time_of {"zone": "a;<|im_end|>"};CALL now {};<|im_end|>')
    assert functions(found.message) == [{"name": "time_of", "arguments": {"zone": "a;<|im_end|>"}},
                                        {"name": "now", "arguments": {}}]
    assert (found.message["content"], found.message["reasoning_content"]) == ("", "So.")
    assert turn("It is cold.<|im_end|>").message == {"role": "assistant", "content": "It is cold."}
    for said in ("CALL now {;", "CALL now {}"):
        found = turn(f"{said}<|im_end|>")
        assert len(found.errors) == 1 and found.message == {"role": "assistant", "content": said}
    with pytest.raises(UserError, match="response_template does not read the tool calls that its chat template writes"):
        check_tools(own)
    own.response_template = {"fields": 7}
    with pytest.raises(UserError, match=r"response_template is wrong: .*; correct it"):
        check_tools(own)


def test_an_unknown_format_is_refused_and_no_template_at_all():
    odd = chatml_tokenizer()
    odd.chat_template = ("{% for m in messages %}<|im_start|>{{ tools if m.role == 'user' }}{{ m.content }}"
                         "{% for c in m.tool_calls or [] %}@{{ c.function.name }}:"
                         "{{ c.function.arguments|tojson }}{% endfor %}<|im_end|>{% endfor %}")
    with pytest.raises(UserError, match="a format that is not known; give the tokenizer a response_template"):
        check_tools(odd)
    ids = odd("@f:{}<|im_end|>")["input_ids"]
    assert parse_turn(odd, ids, TOOLS) == ({"role": "assistant", "content": "@f:{}"}, [])
    with pytest.raises(UserError, match="the tokenizer has none"):
        check_tools(tiny_tokenizer())


# In the shape of SmolLM3's: tools have another name, and calls of the assistant are not read from messages.
SMOL = ("<|im_start|>system\n{% if xml_tools %}<tools>{% for t in xml_tools[:] %}{{ t }}\n{% endfor %}</tools> Call:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>{% endif %}<|im_end|>\n'
        "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize(("content", "begin"), [("", ""), ("I look.", "I look.\n")])
def test_calls_are_written_into_the_content_where_a_template_asks_for_them_and_reads_none(content, begin):
    own = chatml_tokenizer()
    own.chat_template = SMOL
    check_tools(own)
    calls = [call("weather_of", city="Oslø"), call("now")]
    asked, answer = {"role": "user", "content": "How warm?"}, {"role": "tool", "name": "weather_of", "content": "7"}
    said = {"role": "assistant", "content": content, "tool_calls": calls}
    text = render(own, [{**asked, "tools": TOOLS}, said, answer])
    written = ('<tool_call>\n{"name": "weather_of", "arguments": {"city": "Oslø"}}\n</tool_call>\n'
               '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert text == own.apply_chat_template(  # as people write it with this template
        [asked, {"role": "assistant", "content": begin + written}, answer], xml_tools=TOOLS, tokenize=False)
    found = parse_turn(own, own(f"{begin}{written}<|im_end|>")["input_ids"], TOOLS)
    assert found.errors == [] and functions(found.message) == [c["function"] for c in calls]
    assert found.message["content"] == content and calls[0]["function"]["name"] == "weather_of"
    own.chat_template = SMOL.replace("tool_call>", "call>")
    with pytest.raises(UserError, match="leaves out tool calls"):
        check_tools(own)


def test_spaces_before_punctuation_stay():
    found = tokenizer_of("qwen2_5")
    found.clean_up_tokenization_spaces = True
    found.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True  # else transformers keeps them
    ids = found('<tool_call>{"name": "f", "arguments": {"a": "x , y ."}}</tool_call>')["input_ids"]
    assert functions(parse_turn(found, ids, []).message)[0]["arguments"] == {"a": "x , y ."}


@pytest.mark.parametrize(("name", "text"), [
    ("qwen2_5", "<tool_call>" * 3_000), ("qwen3_6", "<parameter=a>" * 2_500), ("llama3_1", '{"name": ' * 4_000),
    ("gptoss", "to=functions.f " * 2_000), ("lfm2_v2", " " * 30_000), ("mistral_named", "[TOOL_CALLS]" * 3_000)])
def test_long_turns_are_read_in_time_that_grows_with_their_length(name, text):
    ids = tokenizer(name)(text, add_special_tokens=False)["input_ids"]
    begun = time.process_time()
    parse_turn(tokenizer(name), ids, TOOLS)
    assert time.process_time() - begun < 5


# -- What a model is shown of a function, and the one line for each function that no model could be shown --------------


def find(word: str, place: Literal["title", "text"] = "text", limit: int | None = None) -> list[str]:
    """Find pages.

    Args:
        word: what to look for
        place: where to look
        limit: how many at most,
            all of them without it

    Returns:
        The pages' names.
    """
    return [word, place, str(limit)]


def test_a_schema_has_the_types_and_descriptions_that_were_written():
    assert schema_of(find, "find") == {"type": "function", "function": {
        "name": "find", "description": "Find pages.",
        "parameters": {"type": "object", "required": ["word"], "properties": {
            "word": {"type": "string", "description": "what to look for"},
            "place": {"type": "string", "enum": ["title", "text"], "description": "where to look"},
            "limit": {"type": "integer", "nullable": True, "description": "how many at most, all of them without it"}}},
        "return": {"type": "array", "items": {"type": "string"}, "description": "The pages' names."}}}


def no_docstring(a: int) -> int:
    return a


def no_hint(a):
    """Do. \n\nArgs:\n    a: it"""


def undescribed(a: int, b: int):
    """Do. \n\nArgs:\n    a: it"""


def many(*values: int):
    """Do. \n\nArgs:\n    values: them"""


def unknown_type(a: Missing):  # noqa: F821 - the fault
    """Do. \n\nArgs:\n    a: it"""


def parts(a: int):
    """Do. \n\nArgs:\n    a: it"""
    yield a


@pytest.mark.parametrize(("function", "says"), [
    (no_docstring, "has no docstring"), (no_hint, "parameter a has no type hint; .* a: str"),
    (undescribed, "does not describe the parameter b; .*'b: what it means'"), (many, r"takes \*values"),
    (unknown_type, "'Missing' is not defined"), (parts, "yields its answer in parts"),
    (functools.partial(find, word="a"), "is a partial; a function is needed"), (3, "is a int; a function is needed")])
def test_what_no_schema_can_show_is_one_line_that_names_the_function(function, says):
    with pytest.raises(UserError, match=f"^environment.tools: x.*{says}") as refused:
        schema_of(function, "environment.tools: x")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
