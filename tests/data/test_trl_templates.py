"""Every chat template that TRL ships: what is trained is what the model sees and says at that turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hybrid_rlhf.data.chat import SkipRow, compose_all, compose_messages, encode_all, encode_prompt
from hybrid_rlhf.data.messages import messages_of
from hybrid_rlhf.engine.decode.admission import stop_ids
from hybrid_rlhf.models.template import dialect_of
from hybrid_rlhf.models.thoughts import thought_of
from tests.factories.releases import transformers_before
from tests.factories.tiny import tiny_tokenizer
from tests.factories.trl_templates import (
    CALLS,
    CONVERSATIONS,
    SAID,
    SYSTEM,
    THOUGHTS,
    TOOLS,
    USER,
    names,
    template_of,
    tokenizer_of,
)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import write_templates  # noqa: E402

FOLDING = {"gemma"}  # refuses a system message
PARTS = {"smolvlm", "idefics3", "llava_next"}
REWRITING = {"deepseek_r1_distill", "deepseekv3", "gptoss", "nemotron_3_5_lightning", "nemotron_3_nano",
             "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
WITHOUT_TOOLS = {"cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2",
                 "llama3", "llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"}


def trained(tokenizer, row) -> str:
    return tokenizer.decode([i for i, m in zip(row.ids, row.loss_mask, strict=True) if m])


class NoModel:
    generation_config = None


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kind", ["one turn", "three turns", "system"])
def test_no_conversation_is_lost_and_each_answer_stands_behind_the_prompt_of_its_rollout(name, kind):
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[kind]
    rows = encode_all(tokenizer, compose_messages(tokenizer, messages))
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    assert len(rows) == (len(turns) if name in REWRITING else 1)
    ends = stop_ids(NoModel(), tokenizer)
    for turn in turns:
        row = rows[turns.index(turn) if name in REWRITING else 0]
        prompt = encode_prompt(tokenizer, messages[:turn])
        assert row.ids[: len(prompt)] == prompt
        assert not row.loss_mask[len(prompt) - 1] and row.loss_mask[len(prompt)]
        said = row.ids[len(prompt) :]
        stop = next(i for i, token in enumerate(said) if token in ends)  # where a rollout of these tokens ends
        assert all(row.loss_mask[len(prompt) : len(prompt) + stop + 1])
        assert not any(row.loss_mask[len(prompt) + stop + 1 : len(prompt) + stop + 2])
        assert messages[turn]["content"] in tokenizer.decode(said[:stop])
    for row in rows:
        assert row.ids[-1] in ends and row.loss_mask[-1]
        text = trained(tokenizer, row)
        assert not any(words in text for words in (SYSTEM, *USER))
        assert tokenizer.decode(row.ids).count(SYSTEM) == (kind == "system")


@pytest.mark.parametrize("name", names())
def test_what_a_template_takes_is_found_by_trying_it(name):
    dialect = dialect_of(tokenizer_of(name))
    assert (dialect.takes_system, dialect.takes_parts) == (name not in FOLDING, name in PARTS)


@pytest.mark.parametrize("name", names())
def test_a_thought_is_trained_where_the_template_has_it_or_the_row_is_refused_for_it(name):
    tokenizer = tokenizer_of(name)
    if name == "qwen3_5_nothink":  # its generation prompt has ended the thought
        with pytest.raises(SkipRow, match="ends the thought before the answer"):
            compose_messages(tokenizer, THOUGHTS)
        return
    rows = encode_all(tokenizer, compose_messages(tokenizer, THOUGHTS))
    text = "".join(trained(tokenizer, row) for row in rows)
    found = [text.find(words) for pair in zip(("So 1.", "So 3.", "So 5."), SAID, strict=True) for words in pair]
    assert found == sorted(found) and found[0] >= 0
    for thought in ("So 1.", "So 3.", "So 5."):
        assert text.count(thought) == 1
    for row in rows:
        whole = tokenizer.decode(row.ids)
        assert whole.count("<think>") == whole.count("</think>")
        assert trained(tokenizer, row).count("<think>") <= 3


@pytest.mark.parametrize("name", names())
def test_tool_calls_are_trained_where_the_template_knows_them_and_else_the_row_is_refused(name):
    tokenizer = tokenizer_of(name)
    if name in WITHOUT_TOOLS:
        with pytest.raises(SkipRow, match=r"the chat template leaves out (the tools|tool calls)"):
            compose_messages(tokenizer, CALLS)
        return
    rows = encode_all(tokenizer, compose_messages(tokenizer, CALLS))
    text = "".join(trained(tokenizer, row) for row in rows)
    assert text.count("weather_of") >= 1 and text.count("Oslo") == 1 and text.count("It is cold.") == 1
    assert "Tells the weather" in tokenizer.decode(rows[0].ids) and "7 degrees" in tokenizer.decode(rows[-1].ids)
    assert not any(words in text for words in ("Tells the weather", "7 degrees", "How warm"))
    assert rows[-1].ids[: len(encode_prompt(tokenizer, CALLS[:3]))] == encode_prompt(tokenizer, CALLS[:3])
    assert all(row.ids[-1] in stop_ids(NoModel(), tokenizer) for row in rows)


def test_tool_calls_are_written_as_text_for_a_template_that_joins_strings():
    tokenizer = tokenizer_of("deepseekv3")  # it shows calls, but no list of tools
    messages = [{k: v for k, v in m.items() if k != "tools"} for m in CALLS]
    first, second = encode_all(tokenizer, compose_messages(tokenizer, messages))
    assert '{"city": "Oslo"}' in trained(tokenizer, first) and "It is cold." in trained(tokenizer, second)


def test_the_page_says_what_is_so():
    page = (ROOT / "docs" / "results" / "templates.md").read_text(encoding="utf-8")
    assert page == write_templates.page(), "write it anew: python docs/write_templates.py"


# -- Tool conversations token by token against TRL's own masks ---------------------------------------------------------


LLAMA_SAID = "'<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}"
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
    for old, new in ((LLAMA_SAID, MARKED_SAID), (CALL_BEGINS, "{%- generation %}" + CALL_BEGINS),
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


# -- A thought stands where the model's template has it, whatever family's markers the row writes it in ----------------


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
