"""Detect what a chat template accepts, by trial renderings, and render messages accordingly.

Templates differ in what they accept without declaring it: some refuse a system message, some drop it, some want content
as a list of parts. Training, chat and server all render here, so that they never see different prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from jinja2 import TemplateError

from hybrid_rlhf.models.call_formats import FORMATS, format_of
from hybrid_rlhf.models.template_kwargs import KWARGS, split_kwargs
from hybrid_rlhf.models.template_trial import check_template, renderings
from hybrid_rlhf.models.thoughts import MARKERS, THOUGHT_FIELDS, markers_in, markers_of, thought_of, words_of

FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError, MemoryError,
          AssertionError)  # errors that a template may raise
INSTRUCTIONS = ("system", "developer")
CARRIED = ("tools", KWARGS)  # fields of a conversation, in its first message
ASKED, SAID, _THOUGHT = "Qask", "Qsay", "Qthought"  # texts that no template contains
CALL = {"type": "function", "id": "call00001", "function": {"name": SAID, "arguments": {ASKED: ASKED}}}
TOOL = {"type": "function", "function": {"name": SAID, "description": SAID, "parameters": {
    "type": "object", "properties": {ASKED: {"type": "string", "description": ASKED}}, "required": [ASKED]}}}
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (cache key, dialect)


class Dialect(NamedTuple):
    """What a chat template accepts and writes.

    takes_parts: content is a list of parts. takes_system, takes_developer: messages of these roles are rendered.
    arguments_as_text: tool-call arguments are JSON text. thought_field: the field of an assistant's thought that is
    rendered. thought_marks: the text before and after a thought; None where the template has none. reads_inline: a
    thought between these marks in the content renders like one in a field. ends: the special tokens that end an
    assistant's turn: of an answer, and of a tool call where that differs; where the template writes none, the one that
    begins the next message. call_sign: the text that a tool call begins with; None where the template cannot render
    one. calls_in_content: the template asks for calls in Hermes' format and leaves them out (SmolLM3): they are written
    into the content. lead: the text before an answer without a thought (gpt-oss's <|channel|>final<|message|>), where
    that contains a special token. behind: all special tokens in a row after the last answer."""

    takes_parts: bool = False
    takes_system: bool = True
    takes_developer: bool = True
    arguments_as_text: bool = False
    thought_field: str | None = None
    thought_marks: tuple[str, str] | None = None
    reads_inline: bool = False
    ends: tuple[str, ...] = ()
    call_sign: str | None = None
    calls_in_content: bool = False
    lead: str = ""
    behind: tuple[str, ...] = ()


def dialect_of(tokenizer) -> Dialect:  # noqa: ANN001
    """The dialect of `tokenizer`'s chat template; the default one without a template."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return Dialect()
    key = (template, tokenizer.eos_token, len(tokenizer))
    if tokenizer not in _known or _known[tokenizer][0] != key:
        _try(tokenizer)
        _known[tokenizer] = (key, _find_dialect(tokenizer))
    return _known[tokenizer][1]


def _try(tokenizer) -> None:  # noqa: ANN001
    """UserError for a template that exceeds its bounds on a few messages (template_trial.py)."""
    asked, reply = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in (asked, reply)]
    calling = [asked, {"role": "assistant", "content": "", "tool_calls": [CALL]},
               {"role": "tool", "name": SAID, "content": SAID}]
    cases = renderings([[{"role": "system", "content": ASKED}, asked, reply, asked, reply], [asked], parts, calling,
                         []], [TOOL])
    special = tuple((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    templates = tokenizer.chat_template
    for text in templates.values() if isinstance(templates, dict) else (templates,):
        check_template(text, special, cases)


def special_ids(tokenizer) -> dict[str, int]:  # noqa: ANN001
    """The tokens that a tokenizer marks as special, with their ids."""
    return {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def apply(tokenizer, messages: Sequence[Mapping], add_generation_prompt: bool = False,  # noqa: ANN001
          continues: bool = False) -> str:
    """Render messages, `adapted` to the template, as text. continues: end it where the last message's content ends, as
    transformers' continue_final_message. Raises one of FAULTS where the template refuses them."""
    extras = carried(messages)
    bare = [{k: v for k, v in m.items() if k not in CARRIED} for m in messages]
    tools = extras.get("tools")
    named = {"xml_tools": tools} if tools else {}  # SmolLM3's name of them
    kwargs, _ = split_kwargs(tokenizer, named | (extras.get(KWARGS) or {}))
    return tokenizer.apply_chat_template(bare, tools=tools, tokenize=False,
                                         add_generation_prompt=add_generation_prompt,
                                         continue_final_message=continues, **kwargs)


def carried(messages: Sequence[Mapping]) -> dict:
    """The fields of the conversation in its messages: available tools, variables of the template."""
    return {name: m[name] for m in reversed(messages) for name in CARRIED if m.get(name)}


def adapted(messages: Sequence[Mapping], dialect: Dialect) -> list[dict]:
    """Messages in the dialect: with roles and content that the template accepts.

    The tools of a conversation are in `tools` of its first message; likewise the template's variables (KWARGS).
    """
    result = [dict(m) for m in messages]
    for message in result:
        if message["role"] == "developer" and not dialect.takes_developer:
            message["role"] = "system"
    if folds_system(result, dialect):
        result = _with_system_in_user_turn(result)
    for message in result:
        if message["role"] == "assistant":
            _place_thought(message, dialect)
        if message.get("tool_calls"):
            message["tool_calls"] = [_call(call, dialect.arguments_as_text) for call in message["tool_calls"]]
            if dialect.calls_in_content:
                _write_calls(message)
        if dialect.takes_parts and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return result


def stripped_marks(tokenizer) -> tuple[str, str]:  # noqa: ANN001
    """The marks before and after a thought, without white space."""
    opening, closing = dialect_of(tokenizer).thought_marks or MARKERS[0]
    return opening.strip(), closing.strip()


def _place_thought(message: dict, dialect: Dialect) -> None:
    """Move the thought to where the template renders it. An empty one, where thoughts have a field, is dropped; so is
    any where the template has no place for it: data/turns.py writes that of an answer."""
    thought, content = thought_of(message)
    markers = None if content == message.get("content") else markers_of(message["content"])
    if dialect.thought_marks is None or (markers is None and not thought):
        return
    is_ours = dialect.thought_field is not None if markers is None else markers[0] == dialect.thought_marks[0].strip()
    if is_ours and dialect.reads_inline:
        return
    for name in THOUGHT_FIELDS:
        message.pop(name, None)
    message["content"] = content.lstrip("\n")
    if thought and dialect.thought_field is not None:
        message[dialect.thought_field] = thought
    elif thought and dialect.reads_inline:
        opening, closing = dialect.thought_marks
        message["content"] = f"{opening}{thought}{closing}{message['content']}"


def _call(call: Mapping, as_text: bool) -> dict:
    """A tool call whose arguments are an object, or with `as_text` its JSON text."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"], as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "arguments": arguments} if "arguments" in call else dict(call)


def _write_calls(message: dict) -> None:
    """Move the calls into the content, in Hermes' format."""
    calls = [call.get("function") or call for call in message.pop("tool_calls")]
    texts = [json.dumps({"name": call.get("name"), "arguments": call.get("arguments") or {}}, ensure_ascii=False)
             for call in calls]
    written = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
    message["content"] = "\n".join([*filter(None, [message.get("content")]), *written])


def folds_system(messages: Sequence[Mapping], dialect: Dialect) -> bool:
    """Whether these messages begin with a system message that is moved into the first user turn."""
    role = messages[0]["role"] if messages else ""
    is_system = role == "system" or (role == "developer" and not dialect.takes_developer)
    return is_system and not dialect.takes_system and any(m["role"] == "user" for m in messages)


def _with_system_in_user_turn(messages: list[dict]) -> list[dict]:
    first = next(i for i, m in enumerate(messages) if m["role"] == "user")
    system = [m for m in messages[:first] if m["role"] == "system"]
    user = {**messages[first], "content": "\n\n".join(m["content"] for m in (*system, messages[first]) if m["content"])}
    rest = [m for m in messages[:first] if m["role"] != "system"] + [user, *messages[first + 1 :]]
    return [{**rest[0], **carried(system)}, *rest[1:]]


def tried(tokenizer, messages: Sequence[Mapping], dialect: Dialect, generation: bool = False) -> str:  # noqa: ANN001
    """The rendered text, or "" where the template refuses."""
    try:
        return apply(tokenizer, adapted(messages, dialect), generation)
    except FAULTS:
        return ""


def _find_dialect(tokenizer) -> Dialect:  # noqa: ANN001
    asked, reply = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}
    dialect = Dialect()

    def shows(messages: Sequence[Mapping], trial: Dialect, words: str) -> bool:
        text = tried(tokenizer, messages, trial)
        return words in text and not re.search(r"""['"]text['"]: """, text)  # the repr of a list of parts

    if not all(shows((asked, reply), dialect, word) for word in (ASKED, SAID)):
        parts = dialect._replace(takes_parts=True)
        if all(shows((asked, reply), parts, word) for word in (ASKED, SAID)):
            dialect = parts
    takes = {f"takes_{role}": shows(({"role": role, "content": "Qrule"}, asked, reply), dialect, "Qrule")
             for role in INSTRUCTIONS}
    dialect = dialect._replace(**takes)
    dialect = _with_thoughts(tokenizer, asked, reply, dialect)
    dialect = dialect._replace(ends=(end,) if (end := _end_of_answer(tokenizer, asked, reply, dialect)) else ())
    dialect = _with_frame(tokenizer, asked, reply, dialect)
    for as_text in (False, True):
        trial = dialect._replace(arguments_as_text=as_text)
        called = shown_call(tokenizer, trial)
        if called is not None:
            trial = trial._replace(call_sign=_sign_of_call(tokenizer, trial))
            end = _end_of_call(tokenizer, called, asked, trial)
            is_other = end and end not in dialect.ends and not any(token in called for token in dialect.ends)
            return trial._replace(ends=(*dialect.ends, end)) if is_other else trial
    asks = format_of(tried(tokenizer, ({**asked, "tools": [TOOL]},), dialect, generation=True)) is FORMATS["hermes"]
    trial = dialect._replace(calls_in_content=True)
    if asks and shown_call(tokenizer, trial) is not None:
        return trial._replace(call_sign=_sign_of_call(tokenizer, trial))
    return dialect


def _with_thoughts(tokenizer, asked: dict, reply: dict, dialect: Dialect) -> Dialect:  # noqa: ANN001
    """The dialect with the place of thoughts: a field, a part of the content, or markers in it. Some templates render
    them only with a call (Gemma 4); others remove them, and their text contains the markers."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": SAID}]
    ways = [(field, {**turn, field: _THOUGHT}) for turn in (reply, calling) for field in THOUGHT_FIELDS]
    shown = ((name, message, tried(tokenizer, (asked, message), dialect)) for name, message in
             (*ways, (None, {**reply, "content": parts})))
    field, message, text = next((way for way in shown if _THOUGHT in way[2] and not re.search(
        r"""['"]thinking['"]: """, way[2])), (None, reply, ""))
    before, _, behind = text.partition(_THOUGHT)
    template = tokenizer.chat_template
    named = markers_in(template if isinstance(template, str) else str(template))
    opening = next((pair[0].strip() for pair in MARKERS if before.rstrip().endswith(pair[0].strip())), None)
    if opening and SAID in behind and "tool_calls" not in message:
        named = (before[before.rindex(opening):], behind.partition(SAID)[0])
    if named is None:
        return dialect._replace(thought_field=field)
    inside = {**reply, "content": f"{named[0]}{_THOUGHT}{named[1]}{SAID}"}
    as_content = tried(tokenizer, (asked, inside), dialect)
    reads = "".join(text.split()) == "".join(as_content.split()) if text else inside["content"] in as_content
    return dialect._replace(thought_field=field, thought_marks=named, reads_inline=reads)


def call_words(tokenizer) -> set[str]:  # noqa: ANN001
    """The special tokens that only mark tool calls: those that the template writes in a call but not in a plain
    conversation, and the markers of known formats."""
    dialect, words = dialect_of(tokenizer), {form.marker for form in FORMATS.values()}
    asked, reply = {"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}
    if getattr(tokenizer, "chat_template", None) and (called := shown_call(tokenizer, dialect)):
        plain = tried(tokenizer, ({"role": "system", "content": ASKED}, asked, reply, asked, reply), dialect)
        words |= {token for token in special_ids(tokenizer) if token in called and token not in plain}
    return words.difference(dialect.ends, dialect.thought_marks or ())


def shown_call(tokenizer, dialect: Dialect) -> str | None:  # noqa: ANN001
    """A tool call rendered by the template, or None where it cannot render one."""
    before, text = _around_call(tokenizer, dialect)
    call = text[len(before) :].rstrip()
    is_whole = SAID in call and call.count(ASKED) == 2 and f"'{ASKED}':" not in call
    return call if is_whole else None


def _around_call(tokenizer, dialect: Dialect) -> tuple[str, str]:  # noqa: ANN001
    """The prompt of a turn that calls a tool, and the conversation with that turn."""
    asked = {"role": "user", "content": ASKED, "tools": [TOOL]}
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return tried(tokenizer, (asked,), dialect, generation=True), tried(tokenizer, (asked, calling), dialect)


def _sign_of_call(tokenizer, dialect: Dialect) -> str:  # noqa: ANN001
    """The text before the name of a called function: a marker (<tool_call>), else a word (to=functions.) or the bracket
    that opens JSON."""
    before, text = _around_call(tokenizer, dialect)
    shared = next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
    closing = (dialect.thought_marks or MARKERS[0])[1].strip()
    opening = text[len(text[:shared].rstrip("<[{")) :].partition(SAID)[0].rpartition(closing)[2].strip()
    marker = re.search(r"<[^<>\s]+>|\[[A-Z_]+\]", opening)
    return marker[0] if marker else opening[:1] if opening.startswith(("[", "{")) else opening.partition(" ")[0]


def _end_of_answer(tokenizer, asked: dict, reply: dict, dialect: Dialect) -> str | None:  # noqa: ANN001
    """The special token after an answer. Of several in a row the last one that also follows an earlier answer, since a
    template may write an end of text (Phi-3) after the end of the turn. Without one after the last answer, the first
    one after an earlier answer (GLM's <|user|>)."""
    last, history = (tried(tokenizer, m, dialect).rpartition(SAID)[2] for m in ((asked, reply), (asked, reply, asked)))
    shared = next((i for i, (a, b) in enumerate(zip(last, history, strict=False)) if a != b), min(map(len, (last,
                  history))))
    run = _leading_specials(tokenizer, last)
    if not run:
        run = [(token, 0) for token, _ in _leading_specials(tokenizer, history) if token != tokenizer.bos_token][:1]
    common = [token for token, end in run if end <= shared]
    return common[-1] if common else run[0][0] if run else None


def _with_frame(tokenizer, asked: dict, reply: dict, dialect: Dialect) -> Dialect:  # noqa: ANN001
    """The dialect with the special tokens around an answer's text, except those of an empty thought."""
    prompt, text = tried(tokenizer, (asked,), dialect, generation=True), tried(tokenizer, (asked, reply), dialect)
    lead = text[len(prompt) :].partition(SAID)[0] if text.startswith(prompt) else ""
    marks = words_of() | {mark.strip() for mark in dialect.thought_marks or ()}
    is_frame = any(token in lead for token in special_ids(tokenizer)) and not any(mark in lead for mark in marks)
    behind = tuple(token for token, _ in _leading_specials(tokenizer, text.rpartition(SAID)[2]))
    return dialect._replace(lead=lead if is_frame else "", behind=behind)


def _end_of_call(tokenizer, called: str, asked: dict, dialect: Dialect) -> str | None:  # noqa: ANN001
    """The special token after a tool call; without one after the last call, the one that begins the tool's answer
    (GLM's <|observation|>)."""
    ending = [token for token in special_ids(tokenizer) if called.endswith(token)]
    if ending or any(token in called for token in dialect.ends):
        return max(ending, key=len, default=None)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "tool", "name": SAID, "tool_call_id": CALL["id"], "content": SAID}
    text = tried(tokenizer, ({**asked, "tools": [TOOL]}, calling, answer), dialect)
    run = _leading_specials(tokenizer, text.partition(called)[2])
    return run[0][0] if run else None


def _leading_specials(tokenizer, text: str) -> list[tuple[str, int]]:  # noqa: ANN001
    """The special tokens that `text` begins with, white space between them allowed, and where each ends."""
    tokens = sorted(special_ids(tokenizer), key=len, reverse=True)
    pattern, specials, place = re.compile(rf"\s*({'|'.join(map(re.escape, tokens))})"), [], 0
    while tokens and (match := pattern.match(text, place)):
        place = match.end()
        specials.append((match[1], place))
    return specials
