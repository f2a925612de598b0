"""Tokens between two turns: prompt, what was said and what was added are the beginning of the whole conversation, as
transformers renders and tokenizes it."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.data.added_turns import added_tokens, check_turns
from hybrid_rlhf.data.chat import CHATML
from hybrid_rlhf.data.turns import num_shared
from hybrid_rlhf.models.template import special_ids
from tests.factories.tiny import chatml_tokenizer, tiny_tokenizer
from tests.factories.trl_templates import TOOLS, names, template_of, tokenizer_of

ALL = [*names(), *names(training=True)]
# base names of templates that leave out calls or tool messages, or (DeepSeek) write a second round otherwise
NO_CALLS = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2", "llama3",
            "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"}
# What removes earlier thoughts, or ends earlier answers otherwise, once a user speaks. The oracle is the same template
# with that condition edited out, or (None) the twin for training that TRL has.
THINK = ("{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}", "")
LFM = ("preserve_thinking | default(false)", "true")
GEMMA = ("(loop.index0 > ns_turn.last_user_idx)", "true")
NEMOTRON = ("truncate_history_thinking if truncate_history_thinking is defined else True", "false")
REWRITES = {
    "deepseek_r1_distill": None, "deepseekv3": THINK, "diffusion_gemma": GEMMA, "gemma4_v5": GEMMA,
    "glm4moe": ("loop.index0 > ns.last_user_index and", ""),
    "gptoss": ("loop.last and not add_generation_prompt", "true", "not future_final_message.found", "true"),
    "lfm2_2_5": LFM, "lfm2_2_5_v2": LFM, "lfm2_2_5_vl": LFM, "nemotron_3_5_lightning": NEMOTRON,
    "nemotron_3_nano": NEMOTRON, "nemotron_3_super": NEMOTRON, "nemotron_3_ultra": NEMOTRON,
    "qwen3": None, "qwen3_5_nothink": None, "qwen3_5_think": None, "qwen3_6": None}
PARTS = {"smolvlm", "idefics3", "llava_next"}
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    "[TOOL_RESULTS] {\"content\": {{ m.content|tojson }}, \"call_id\": \"{{ m.tool_call_id }}\"}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('nine letters') }}{% endif %}{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments|tojson }}, \"id\": \"{{ c.id }}\"}{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}")


def base(name: str) -> str:
    return name.removesuffix("_training")


def call(name: str = "weather_of", ident: str = "abcde1234", **arguments) -> dict:
    return {"type": "function", "id": ident, "function": {"name": name, "arguments": arguments}}


def turn(name: str, role: str, number: int, thinks: bool) -> dict:
    """A turn of the assistant as this template takes it."""
    said = {"role": "assistant", "content": f"The {number}." if role == "user" else ""}
    if role == "tool":
        said["tool_calls"] = [call(("weather_of", "time_of")[number % 2], f"abcde123{number}", city=f"Oslo {number}")]
    if thinks:
        if re.match("gptoss|lfm2_2_5|nemotron|muse|qwen3_8|gemma4_v5|diffusion", name):
            field = "thinking" if name == "lfm2_2_5" or name.startswith("gptoss") else "reasoning_content"
            said[field] = f"So {number}."
        else:
            said["content"] = f"<think>\nSo {number}.\n</think>\n\n{said['content']}"
    return said


def whole(tokenizer, name: str, talk: list[dict], prompt: bool = False, template: str | None = None) -> list[int]:
    """A conversation by transformers alone, as text and tokenized whole."""
    if base(name) in PARTS:
        talk = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk]
    text = tokenizer.apply_chat_template(talk, tools=TOOLS, tokenize=False, add_generation_prompt=prompt,
                                         chat_template=template)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def cut(tokenizer, said: list[int]) -> tuple[list[int], bool]:
    """What is said to its end of turn, and whether it has one: what stands behind it is white space (and, in Phi-3's
    last turns, an end of text)."""
    if "<|end|>" in tokenizer.chat_template and tokenizer.eos_token == "<|endoftext|>":
        return said[: said.index(tokenizer.convert_tokens_to_ids("<|end|>")) + 1], True
    last = next(i for i in reversed(range(len(said))) if tokenizer.decode([said[i]]).strip())
    return said[: last + 1], said[last] in special_ids(tokenizer).values()


def episode(name: str, roles: list[str], template: str | None = None) -> list[list[int]]:
    """The contexts of all turns, from tokens in and tokens out, each of which is the whole conversation's as `template`
    (or the tokenizer's own) renders it."""
    tokenizer, talk = tokenizer_of(name), [{"role": "user", "content": "How warm is it?"}]
    contexts = [whole(tokenizer, name, talk, True)]
    for number, role in enumerate(roles):
        message = turn(name, role, number, thinks(name, role))
        last = whole(tokenizer, name, [*talk, message], template=template)
        assert last[: len(contexts[-1])] == contexts[-1]
        said, is_ended = cut(tokenizer, last[len(contexts[-1]) :])
        calls = {"tool_calls": message["tool_calls"]} if role == "tool" else {}
        answer = {"role": role, "content": f"7 degrees {number}"}
        if role == "tool":
            answer |= {"name": calls["tool_calls"][0]["function"]["name"], "tool_call_id": f"abcde123{number}"}
        contexts.append(contexts[-1] + said + added_tokens(tokenizer, {"role": "assistant", "content": "", **calls},
                                                           [answer], is_ended))
        talk = [*talk, message, answer]
        assert whole(tokenizer, name, talk, True, template) == contexts[-1]
    return contexts


def keeping(name: str) -> str:
    """The template `name`, changed to keep earlier turns as they were."""
    edits = REWRITES[base(name)]
    if edits is None:
        return template_of(f"{base(name)}_training")
    template = template_of(name)
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert old in template
        template = template.replace(old, new)
    return template


def rewrites(name: str) -> bool:
    return base(name) in REWRITES and not (name.endswith("_training") and REWRITES[base(name)] is None)


def thinks(name: str, role: str) -> bool:
    """Whether turns have thoughts: not behind a prompt that ended them, nor where a template has no place for them."""
    has_no_place = role == "tool" and re.match("gemma4(_v[234])?$|llama3_[12]", name)
    return not (base(name) == "qwen3_5_nothink" or has_no_place)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("role", ["tool", "user"])
def test_tokens_in_and_tokens_out_are_the_whole_conversation_where_history_is_kept(name, role):
    tokenizer = tokenizer_of(name)
    if role == "tool" and base(name) in NO_CALLS:
        with pytest.raises(UserError, match=f"role {role}.*data.chat_template.*get_training_chat_template"):
            check_turns(tokenizer, role)
    elif role == "user" and rewrites(name):
        assert check_turns(tokenizer, role) in ("it leaves out thoughts", "they read otherwise",
                                                "it leaves out what generation begins with")
        with pytest.raises(AssertionError):
            episode(name, [role] * 3)
    else:
        assert not check_turns(tokenizer, role)
        assert len(episode(name, [role] * 3)) == 4


@pytest.mark.parametrize("name", [n for n in ALL if rewrites(n)])
@pytest.mark.parametrize("roles", [["user"] * 3, ["tool", "user", "tool", "tool", "user"]])
def test_turns_stay_as_they_were_sampled_where_the_template_rewrites_them(name, roles):
    if "tool" in roles and base(name) in NO_CALLS:
        pytest.skip("its tools are refused")
    tokenizer = tokenizer_of(name)
    contexts = episode(name, roles, keeping(name))
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(contexts))
    asked = [{"role": "user", "content": "How warm is it?"}]
    one = whole(tokenizer, name, [*asked, turn(name, roles[0], 0, thinks(name, roles[0]))])
    if not base(name).startswith("deepseek"):  # whose last turn lacks its thought
        assert num_shared(one, contexts[1]) >= len(cut(tokenizer, one)[0]) > len(contexts[0])


@pytest.mark.parametrize("name", [n for n in ALL if base(n) not in NO_CALLS])
def test_markers_in_the_answer_of_a_tool_are_text(name):
    tokenizer = tokenizer_of(name)
    special = set(special_ids(tokenizer).values())
    markers = " ".join(tokenizer.convert_ids_to_tokens(i) for i in special)
    message = {"role": "assistant", "content": "", "tool_calls": [call(city="Oslo")]}

    def added(content: str) -> list[int]:
        return added_tokens(tokenizer, message, [{"role": "tool", "content": content}], True)

    plain, hostile = added("7 degrees"), added(f"7 {markers} degrees")
    assert [i for i in hostile if i in special] == [i for i in plain if i in special]
    if not re.match("gptoss|llama3", name):  # these write it as JSON
        assert f"7 {markers} degrees" in tokenizer.decode(hostile)


QWEN = "\n<|im_start|>user\n<tool_response>\n7 degrees\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
GLM = "\n<tool_response>\n7 degrees\n</tool_response><|assistant|>"
LLAMA = '<|start_header_id|>ipython<|end_header_id|>\n\n"7 degrees"<|eot_id|>'


@pytest.mark.parametrize(("name", "calls", "is_ended", "text"), [
    ("qwen2_5", ["f"], True, QWEN), ("qwen2_5", ["f"], False, "<|im_end|>" + QWEN),  # which was not said
    ("glm4moe", ["f"], True, GLM), ("glm4moe", ["f"], False, "<|observation|>" + GLM),  # the next header is the end
    ("gptoss", ["time_of"], True, '<|start|>functions.time_of to=assistant<|channel|>commentary<|message|>"7 degrees"'
                                  "<|end|><|start|>assistant"),
    ("llama3_1", ["f", "g"], True, 2 * LLAMA + "<|start_header_id|>assistant<|end_header_id|>\n\n")])
def test_answers_of_tools_stand_behind_the_end_of_the_turn_before_the_next_prompt(name, calls, is_ended, text):
    tokenizer = tokenizer_of(name)
    message = {"role": "assistant", "content": "", "tool_calls": [
        call(function, f"abcde123{i}") for i, function in enumerate(calls)]}
    answers = [{"role": "tool", "content": "7 degrees"}] * len(calls)
    assert tokenizer.decode(added_tokens(tokenizer, message, answers, is_ended)) == text


@pytest.mark.parametrize(("name", "end", "text"), [
    ("qwen3", "<|im_end|>", "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3_6", "<|im_end|>", "\n<|im_start|>user\n7<|im_end|>\n<|im_start|>assistant\n<think>\n"),
    ("glm4moe", "<|user|>", "\n7<|assistant|>"),
    ("gptoss", "<|end|>", "<|start|>user<|message|>7<|end|><|start|>assistant"),  # <|return|>, where it is sampled
    ("deepseek_r1_distill", "<｜end▁of▁sentence｜>", "<｜User｜>7<｜Assistant｜><think>\n")])
@pytest.mark.parametrize("is_ended", [True, False])
def test_a_user_s_message_stands_behind_a_turn_that_the_template_would_rewrite(name, end, text, is_ended):
    ids = added_tokens(tokenizer_of(name), {"role": "assistant", "content": "x"}, [{"role": "user", "content": "7"}],
                       is_ended)
    assert tokenizer_of(name).decode(ids) == ("" if is_ended else end) + text


@pytest.fixture
def mistral():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<s>", "</s>"],
                         special_tokens=True)
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = "<s>", "</s>", MISTRAL
    return tokenizer


@pytest.mark.parametrize("ids", [("a1b2c3d4e", "e5d4c3b2a"), (None, None)])
def test_answers_name_the_calls_that_they_answer_and_ids_are_made_where_the_model_says_none(mistral, ids):
    calls = [{k: v for k, v in call(name, ident).items() if v} for name, ident in zip(("f", "g"), ids, strict=True)]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    first, second = (ident or made for ident, made in zip(ids, ("call00000", "call00001"), strict=True))

    def shown(*added: dict) -> str:
        return mistral.decode(added_tokens(mistral, message, added, True))

    one, two = (f'[TOOL_RESULTS] {{"content": "{word}", "call_id": "{ident}"}}[/TOOL_RESULTS]'
                for word, ident in (("one", first), ("two", second)))
    assert shown({"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}) == one + two
    assert shown({"role": "tool", "content": "two", "tool_call_id": second},
                 {"role": "tool", "content": "one", "tool_call_id": first}) == two + one
    assert shown({"role": "tool", "content": "one", "tool_call_id": "no id of a call"}) == one


def test_a_turn_without_a_readable_call_is_answered_by_a_tool_or_by_a_user(mistral):
    said = {"role": "assistant", "content": '[TOOL_CALLS] [{"name'}
    assert mistral.decode(added_tokens(mistral, said, [{"role": "tool", "content": "no"}], True)) == (
        '[TOOL_RESULTS] {"content": "no", "call_id": "call00000"}[/TOOL_RESULTS]')
    assert mistral.decode(added_tokens(mistral, said, [{"role": "user", "content": "no"}], True)) == "[INST] no[/INST]"
    gemma = tokenizer_of("gemma4")  # a call ends by <|tool_response>, which this turn did not say
    assert gemma.decode(added_tokens(gemma, said, [{"role": "tool", "name": "f", "content": "no"}], True)) == (
        '<|tool_response>response:f{value:<|"|>no<|"|>}<tool_response|>')


def test_messages_that_a_template_refuses_or_drops_are_an_error_and_not_other_tokens():
    message = {"role": "assistant", "content": "", "tool_calls": [call()]}
    for name in ("gemma3", "llama3", "phi3"):
        with pytest.raises(UserError, match=r"the chat template (refuses|leaves out).*role tool.*data.chat_template"):
            added_tokens(tokenizer_of(name), message, [{"role": "tool", "content": "7"}], True)
    with pytest.raises(UserError, match="no"):
        check_turns(tiny_tokenizer(), "user")  # it has no template


@pytest.mark.parametrize(("old", "new"), [
    ("message['content'] +", "message['content'] + (' /think' if message['role'] == 'user' and loop.last else '') +"),
    ("message['content'] +", "message['content'] + (' /think' if loop.last and not loop.first else '') +"),
    ("'<|im_start|>' +", "'<|im_start|>' + loop.index|string +"),
    ("{%- for", "{{- 'Begin.' if messages|length == 1 }}{%- for"),
    ("in messages", "in messages[-3:]")])
def test_a_template_that_rewrites_more_than_the_assistant_s_turns_is_refused(old, new):
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = CHATML.replace(old, new, 1)
    assert tokenizer.chat_template != CHATML
    with pytest.raises(UserError, match=r"role user follow \(the prompt or what stands behind a turn reads"):
        check_turns(tokenizer, "user")


def test_tools_that_move_to_the_last_user_message_are_history_rewritten():
    tokenizer = chatml_tokenizer()
    check_turns(tokenizer, "user")
    tokenizer.chat_template = CHATML.replace(
        "message['content'] +", "(((tools|tojson) if tools and loop.last else '') ~ message['content']) +")
    check_turns(tokenizer, "user")
    with pytest.raises(UserError, match=r"role user follow \(the tools move\)"):
        check_turns(tokenizer, "user", has_tools=True)
