"""Tools, tool calls and tool results as rows write them: objects, JSON text, tables that fill missing keys with null.

What comes out is the one form that chat templates read: tools and calls as {"type": "function", "function": {...}},
arguments as an object.
"""

from __future__ import annotations

import json

from hybrid_rlhf.data.files import loads
from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.data.turns import SkipRow, Text

NO_OBJECT = "a tool call whose arguments are no JSON object"


def with_tools(messages: Text | None, tools: list[dict]) -> Text | None:
    """Messages of which the first carries the tools that may be called; a string as it is."""
    if not isinstance(messages, list) or not messages or not tools:
        return messages
    return [{**messages[0], "tools": tools}, *messages[1:]]


def tools_of(tools: object, column: str = "tools") -> list[dict]:
    """The schemas of a row's tools, of which the list or each one may be JSON text; none for null or "".

    Raises TypeError or ValueError that names the column for what is no list of schemas.
    """
    found = _parsed(tools) if isinstance(tools, str) and tools.strip() else tools
    if not found or (isinstance(found, str) and not found.strip()):
        return []
    schemas = [_parsed(tool) for tool in found] if isinstance(found, list) else []
    if not schemas or not all(isinstance(tool, dict) for tool in schemas):
        raise TypeError(f"{column} must be a list of tool schemas, not {tools!r:.40}")
    return [_wrapped(without_nulls(tool)) for tool in schemas]


def kwargs_of(kwargs: object) -> dict:
    """The variables of the chat template that a row sets: a mapping, or its JSON text. SkipRow for what is none."""
    found = without_nulls(_parsed(kwargs) or {})
    if not isinstance(found, dict):
        raise SkipRow("chat_template_kwargs that are no mapping")
    return found


def calls_of(message: dict, content: object, column: str) -> list[dict]:
    """The tool calls of a message: its `tool_calls`; OpenAI's older `function_call`; or `content`, where the role of
    the message is LLaMA-Factory's function_call. Each may be JSON text.

    Raises TypeError that names the column for what is no call, SkipRow for arguments that are no JSON object.
    """
    calls = message.get("tool_calls") or message.get("function_call")
    if not calls and message.get("role", message.get("from")) == "function_call":
        calls = _parsed(content)
        if not isinstance(calls, dict | list):
            raise SkipRow("a function_call that is no JSON object")
    calls = _parsed(calls) or []
    if not isinstance(calls, dict | list):
        raise TypeError(f"{column}: tool_calls must be a list of tool calls, not {type(calls).__name__}")
    return [_call(call, column) for call in ([calls] if isinstance(calls, dict) else calls)]


def result_of(content: object) -> object:
    """What a tool returned, as text or text in parts: JSON of anything else, as environments show it."""
    is_parts = isinstance(content, list) and content and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return content if isinstance(content, str) or is_parts else json.dumps(without_nulls(content), ensure_ascii=False)


def without_nulls(value: object) -> object:
    """A JSON value without keys that hold null, since tables give every row the keys of all rows, its texts cleaned."""
    if isinstance(value, dict):
        return {clean(str(k)): without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, str):
        return clean(value)
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _call(call: object, column: str) -> dict:
    """A call with its arguments as an object; those that were JSON text keep their nulls."""
    call = _parsed(call)
    if not isinstance(call, dict):
        raise TypeError(f"{column}: a tool call must be an object, not {type(call).__name__}")
    call = _wrapped(without_nulls(call))
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError(f"{column}: a tool call needs the name of its function")
    given = function.get("arguments", {})
    given = (_parsed(given) if given.strip() else {}) if isinstance(given, str) else given
    if not isinstance(given, dict):
        raise SkipRow(NO_OBJECT)
    return {**call, "function": {**function, "arguments": given}}


def _wrapped(value: dict) -> dict:
    """A tool or a call as OpenAI writes it: what is of the function inside `function`, an id beside it."""
    if "function" in value or "name" not in value:
        return value
    outer = {k: v for k, v in value.items() if k in ("id", "type")}
    return {"type": "function", **outer, "function": {k: v for k, v in value.items() if k not in outer}}


def _parsed(value: object) -> object:
    """What the JSON text says; text that is none, and any other value, as it is."""
    try:
        return loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
