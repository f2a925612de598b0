"""Parse a sampled turn into text, thought and tool calls, by transformers' response parser.

A tokenizer may have a response template; for others models/call_formats.py has one, chosen by how the chat template
renders a call. A call that cannot be read becomes an error line, with which the model can be answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hybrid_rlhf.core.errors import UserError, check, shortened
from hybrid_rlhf.models import template
from hybrid_rlhf.models.call_formats import CallFormat, format_of, read_python
from hybrid_rlhf.models.template import ASKED, CALL, SAID, TOOL, dialect_of, special_ids
from hybrid_rlhf.models.thoughts import MARKERS, THOUGHT_FIELDS
from hybrid_rlhf.models.transformers_compat import read_response, response_template

_OPENED = re.compile(rf"(?:{'|'.join(re.escape(opening.strip()) for opening, _ in MARKERS)})\s*\Z")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_MARKS = re.compile(r"[<>\[\]{}|;]")  # characters that formats' markers begin or end with
_DECODER = json.JSONDecoder()
_CURE = ("give data.chat_template one that shows tools, calls and tool messages, or a model that was trained to call "
         "tools (Qwen2.5, Qwen3, Llama 3.1)")
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (cache key, reader or None)


class ParsedTurn(NamedTuple):
    """message: {"role": "assistant", "content": str, "reasoning_content"?: str, "tool_calls"?: [{"type": "function",
    "id"?: str, "function": {"name": str, "arguments": dict}}]}; an id only where the model wrote one. errors: one line
    for each call that cannot be read. With any, the message has no calls, and its content is the sampled text without
    thoughts and the end of the turn."""

    message: dict
    errors: list[str]


class _Reader(NamedTuple):
    """compiled: the response template as compiled by transformers. form: the format, or None where the template is the
    tokenizer's. ends: ids of the tokens that end a turn."""

    compiled: Any
    form: CallFormat | None
    ends: frozenset[int]


class _Unreadable(ValueError):
    """A call that cannot be read; the message says why."""


def parse_turn(tokenizer, ids: Sequence[int], tools: list[dict], prefix: str = "") -> ParsedTurn:  # noqa: ANN001
    """Parse the sampled tokens `ids` of one turn, with its stop token if there is one.

    tools: JSON schemas of the tools, for the types of arguments that a format writes as bare text. prefix: the text
    before the turn, or its end: a generation prompt may open a thought. With a tokenizer whose call format is unknown
    the turn has no calls (`check_tools` refuses it).
    """
    reader, ids = _reader_of(tokenizer), list(ids)
    ended = _without_ends(ids, _ends(tokenizer) if reader is None else reader.ends)
    text = _decoded(tokenizer, ended)
    if reader is None:
        return ParsedTurn({"role": "assistant", "content": text.strip()}, [])
    if reader.form is None:
        return _parsed(reader, _decoded(tokenizer, ids), _decoded(tokenizer, ids[len(ended) :]), tools, prefix)
    opened = _OPENED.search(prefix)
    return _parsed(reader, text, "", tools, opened[0] if opened else "")


def check_tools(tokenizer) -> None:  # noqa: ANN001
    """UserError, with the cure, for a tokenizer whose template cannot render tools, calls and tool messages, or whose
    call format is unknown."""
    check(tokenizer.chat_template, f"tools need a chat template, and the tokenizer has none; {_CURE}")
    dialect = dialect_of(tokenizer)
    asked = {"role": "user", "content": ASKED}
    with_tools = template.tried(tokenizer, ({**asked, "tools": [TOOL]},), dialect, generation=True)
    check(SAID in with_tools, f"the chat template leaves out the tools; {_CURE}")
    shown = template.shown_call(tokenizer, dialect)
    if shown is None:
        raise UserError(f"the chat template leaves out tool calls; {_CURE}")
    turns = (asked, {"role": "assistant", "content": "", "tool_calls": [CALL]},
             {"role": "tool", "name": SAID, "tool_call_id": CALL["id"], "content": "Qanswer"})
    answered = template.tried(tokenizer, turns, dialect, generation=True)
    check("Qanswer" in answered, f"the chat template leaves out the messages of tools; {_CURE}")
    reader = _reader_of(tokenizer)
    check(reader, "the chat template writes tool calls in a format that is not known; give the tokenizer a "
                  "response_template (tokenizer_config.json), or data.chat_template a template of a known format")
    ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
    calls = parse_turn(tokenizer, ids, [TOOL]).message.get("tool_calls")
    check(calls and calls[0]["function"] == CALL["function"],
          "the tokenizer's response_template does not read the tool calls that its chat template writes; give a "
          "tokenizer whose response_template fits its chat_template")


def _ends(tokenizer) -> frozenset[int]:  # noqa: ANN001
    known = special_ids(tokenizer)
    dialect = dialect_of(tokenizer)
    return frozenset({known[end] for end in dialect.ends + dialect.behind} | ({tokenizer.eos_token_id} - {None}))


def _reader_of(tokenizer) -> _Reader | None:  # noqa: ANN001
    """The reader of the tokenizer's turns; None for an unknown format. Cached per chat template."""
    spec = getattr(tokenizer, "response_template", None)
    chat = getattr(tokenizer, "chat_template", None)
    key = (chat if isinstance(chat, str) else repr(chat), id(spec), tokenizer.eos_token_id, len(tokenizer))
    if tokenizer not in _known or _known[tokenizer][0] != key:
        _known[tokenizer] = (key, _make_reader(tokenizer, spec), spec)  # spec is kept, so that its id is not reused
    return _known[tokenizer][1]


def _make_reader(tokenizer, spec: dict | None) -> _Reader | None:  # noqa: ANN001
    ends = _ends(tokenizer)
    if spec is not None:
        try:
            return _Reader(response_template(spec), None, ends)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"the tokenizer's response_template is wrong: {error}; correct it in tokenizer_config.json"
                            ) from error
    shown = template.shown_call(tokenizer, dialect_of(tokenizer)) if tokenizer.chat_template else None
    form = format_of(shown) if shown is not None else None
    return None if form is None else _Reader(response_template(form.template), form, ends)


def _without_ends(ids: list[int], ends: frozenset[int]) -> list[int]:
    last = len(ids)
    while last and ids[last - 1] in ends:
        last -= 1
    return ids[:last]


def _decoded(tokenizer, ids: list[int]) -> str:  # noqa: ANN001
    """The text of tokens with special ones, which may be the format's markers."""
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""


def _parsed(reader: _Reader, text: str, end: str, tools: list[dict], prefix: str) -> ParsedTurn:
    """text: of the turn. end: its part that ends the turn, where the response template reads that too."""
    shielded = _shielded(reader, text)
    try:
        fields, calls = _read(reader, shielded, tools, prefix)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        place, thought = _behind_thought(reader, text, prefix)
        errors = _faults(reader, shielded, tools, prefix) or [_line(reader, error)]
        return ParsedTurn(_message(thought, text[place:].removesuffix(end)), errors)
    thought = next((fields[name] for name in THOUGHT_FIELDS if isinstance(fields.get(name), str)), "")
    content = _content(reader, fields, text) if calls or fields.get("content") or not thought else ""
    message = _message(thought, content.removesuffix(end) if end else content)
    return ParsedTurn({**message, "tool_calls": calls} if calls else message, [])


def _message(thought: str, content: str) -> dict:
    message = {"role": "assistant", "content": content.strip()}
    return {**message, "reasoning_content": thought.strip()} if thought.strip() else message


def _content(reader: _Reader, fields: dict, text: str) -> str:
    """The answer of a turn. Where the format frames it and this turn does not: the text outside of all frames."""
    content = fields.get("content") or ""
    if reader.form is None:
        return content if content or fields.get("tool_calls") else text
    if reader.form.rest is not None and not content:
        return reader.form.rest.sub("", fields.get("rest") or "")
    return content


def _read(reader: _Reader, text: str, tools: list[dict], prefix: str) -> tuple[dict, list[dict]]:
    """(the fields of a turn, its calls). Raises ValueError, TypeError or KeyError for a call that cannot be read."""
    fields, events = read_response(reader.compiled, text, prefix, tools)
    _check_regions(reader, text, events)
    calls = [call for value in fields.get("tool_calls") or () for call in _calls(reader, value)]
    left = f"{fields.get('content') or ''}{fields.get('rest') or ''}"
    if reader.form is not None and reader.form.marker in left:
        raise _Unreadable(f"it does not go on as a call does behind {reader.form.marker}")
    return fields, calls


def _check_regions(reader: _Reader, text: str, events: list[dict]) -> None:
    """Raise _Unreadable for a call without an end, or with text besides its arguments: the parser accepts both."""
    field, body, last = reader.compiled.fields.get("tool_calls"), [], None
    if field is None or field.close_re is None:
        return
    for event in events:
        if event["type"] == "region_open":
            body, last = [], event["field"]
        elif event["type"] == "region_chunk":
            body.append(event["text"])
        elif event["field"] == "tool_calls" and reader.form is not None and field.content == "xml-inline":
            left = re.sub(field.content_args["tag_pattern"], "", "".join(body), flags=re.DOTALL).strip()
            if left:
                raise _Unreadable(f"{shortened(left, 200)!r} in it is not an argument")
    is_last = last == "tool_calls" and text.endswith("".join(body))
    if is_last and not any(closing.end() == len(text) for closing in field.close_re.finditer(text)):
        raise _Unreadable("it has no end")


def _calls(reader: _Reader, value: Any) -> Iterator[dict]:
    """The calls in one region. Raises _Unreadable for anything else."""
    inner = value.get("function", value) if isinstance(value, Mapping) else value
    if reader.form is not None and reader.form.python:
        inner = [{"name": name, "arguments": arguments} for name, arguments in _python(str(inner))]
    if isinstance(inner, list):
        for item in inner:
            yield from _calls(reader._replace(form=reader.form and reader.form._replace(python=False)), item)
        return
    if not isinstance(inner, Mapping):
        raise _Unreadable("it is not a JSON object")
    name, key = inner.get("name"), reader.form.key if reader.form else "arguments"
    arguments = inner.get("arguments", inner.get(key))
    if not isinstance(name, str) or not name.strip():
        raise _Unreadable("it names no function")
    if arguments is None and not any(other in inner for other in ("arguments", "parameters")):
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _Unreadable(f"its {key} are not an object")
    call_id = value.get("id") if isinstance(value, Mapping) and value.get("id") else inner.get("id")
    with_id = {"id": call_id} if isinstance(call_id, str) and call_id else {}
    function = {"name": _clean(name.strip()), "arguments": _clean(dict(arguments))}
    yield {"type": "function", **with_id, "function": function}


def _python(text: str) -> list[tuple[str, dict]]:
    try:
        return read_python(text)
    except SyntaxError as error:
        raise _Unreadable(f"{error.msg}") from error


def _clean(value: Any) -> Any:
    """The value without lone surrogates, which JSON can contain (\\ud800) and UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_clean(k): _clean(v) for k, v in value.items()}
    return [_clean(v) for v in value] if isinstance(value, list) else value


def _behind_thought(reader: _Reader, text: str, prefix: str) -> tuple[int, str]:
    """The end of the thoughts that `text` begins with, as an index into it, and their text."""
    for name in THOUGHT_FIELDS:
        field = reader.compiled.fields.get(name)
        if field is None or field.open_re is None or field.close_re is None:
            continue
        opened = field.open_re.match(text)
        start = opened.end() if opened else 0 if _OPENED.search(prefix) else None
        closed = None if start is None else field.close_re.search(text, start)
        if closed:
            return closed.end(), text[start : closed.start()]
    return 0, ""


def _faults(reader: _Reader, text: str, tools: list[dict], prefix: str) -> list[str]:
    """An error line for each call in `text` that cannot be read by itself."""
    field = reader.compiled.fields.get("tool_calls")
    if field is None or field.open_re is None:
        return []
    start = _behind_thought(reader, text, prefix)[0]
    starts = {opening.start(): opening.end() for opening in field.open_re.finditer(text, start)}
    lines = []
    for place, following in pairwise([*starts, len(text)]):
        try:
            if field.close_re is not None and not field.close_re.search(text, starts[place], following):
                raise _Unreadable("it has no end")
            _read(reader, text[place:following], tools, "")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            lines.append(_line(reader, error))
    return lines


def _line(reader: _Reader, error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(error, _Unreadable):
        reason = str(error)
    elif isinstance(cause, json.JSONDecodeError):
        reason = f"its JSON is wrong ({cause.msg} at character {cause.pos})"
    elif isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    else:
        reason = str(error)
    form = f"; a call is written {reader.form.form}" if reader.form is not None else ""
    return shortened(" ".join(f"this tool call cannot be read: {reason}{form}".split()), 600)


def _shielded(reader: _Reader, text: str) -> str:
    """`text` with markers' characters escaped in the strings of JSON calls: a string may contain </tool_call>."""
    field = reader.compiled.fields.get("tool_calls")
    if field is None or field.open_re is None or field.content != "json" or field.content_args.get("string_delims"):
        return text
    pieces, done = [], 0
    for opening in field.open_re.finditer(text):
        if opening.end() < done:  # inside a string of the previous call
            continue
        start = len(text) - len(text[opening.end() :].lstrip())
        try:
            end = _DECODER.raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            continue
        pieces += [text[done:start], _STRING.sub(_escaped, text[start:end])]
        done = end
    return "".join([*pieces, text[done:]])


def _escaped(string: re.Match) -> str:
    return _MARKS.sub(lambda mark: f"\\u{ord(mark[0]):04x}", string[0])
