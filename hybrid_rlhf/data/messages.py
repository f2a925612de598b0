"""Convert conversations in rows to lists of {"role", "content"}: messages, plain transcripts, tools and tool calls.

Values may be JSON text, and tables fill missing keys with null. Tools and calls get the one form that chat templates
read: {"type": "function", "function": {...}}, arguments as an object.
"""

from __future__ import annotations

import json
import re

from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.data.row_images import COLUMNS, is_filled, is_image, source_of
from hybrid_rlhf.data.turns import IMAGE, IMAGES, SkipRow, Text, num_shared
from hybrid_rlhf.models.thoughts import THOUGHT_FIELDS

_ROLES = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
          "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system",
          "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
          "developer": "developer"}
# keys for whether a message is trained, as in data for OpenAI, axolotl, LLaMA-Factory and ms-swift
_TRAINED = ("weight", "train", "training", "trainable", "loss_mask", "loss")
_MARKS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_OFTEN_MESSAGES = ("prompt", "chosen", "rejected", "messages")
_READ = ("role", "from", "content", "value", "tool_calls", "function_call", *_TRAINED)  # other keys are passed on
MEDIA = frozenset(f"{kind}{ending}" for kind in ("image", "video", "audio") for ending in (
    "", "s", "_url", "_urls", "_path", "_paths"))
WITH_MEDIA = "a row with images, video or audio (only text is read)"
NO_READER = "a row with images, of which the model's folder has no processor (only text is read)"
_TURN = re.compile(r"\n\n(Human|Assistant):")
NO_OBJECT = "a tool call whose arguments are not a JSON object"


def messages_of(rows: list, column: str) -> list[dict]:
    """Messages with our role names, from {"role", "content"} or ShareGPT's {"from", "value"}.

    Raises TypeError or ValueError, which names the column, for anything that is not a message.
    """
    if not rows:
        raise SkipRow(f"empty {column}")
    if all(isinstance(row, dict) and {"input", "output"} <= row.keys() for row in rows):  # Capybara's turns
        rows = [{"role": role, "content": row[key]} for row in rows
                for role, key in (("user", "input"), ("assistant", "output"))]
    return [_message(row, column) for row in rows]


def parsed_messages(text: str, column: str, is_answer: bool = False) -> list[dict] | None:
    """The messages in `text`, if all of it is their JSON (for an answer: with one of the assistant); None for any other
    text. Raises ValueError for messages as Python prints them, in a column that usually holds messages."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        rows = loads(text)
    except ValueError:
        if column in _OFTEN_MESSAGES and re.fullmatch(
                r"\s*\[\s*\{\s*'(role|from|content|value)':.*\}\s*\]\s*", text, re.DOTALL):
            raise ValueError(f"{column} holds messages as Python prints them; write JSON") from None
        return None
    rows = [rows] if isinstance(rows, dict) else rows
    is_of_messages = isinstance(rows, list) and rows and all(
        isinstance(row, dict) and ({"role", "content"} <= row.keys() or {"from", "value"} <= row.keys())
        and row.get("role", row.get("from")) in tuple(_ROLES) for row in rows)
    messages = messages_of(rows, column) if is_of_messages else []
    return messages if not is_answer or any(m["role"] == "assistant" for m in messages) else None


def has_media(row: dict) -> bool:
    """Whether a key of a row, or of a message, holds images, video or audio."""
    return any(value and ((str(name).lower() in MEDIA and is_filled(value))
                          or (isinstance(value, dict) and str(value.get("type")) in MEDIA))
               for name, value in row.items())


def media_of(row: dict) -> str:
    """Why a row with media is not read: a column of images under a name that is not read is named."""
    name = next((name for name, value in row.items() if isinstance(value, dict) and value.get("type") == "image"), None)
    return WITH_MEDIA if name is None else f"images in the column {name} (columns: {{images: {name}}} reads them)"


def without_images(row: dict) -> dict:
    """A row with a column of images without it, and without further names of them."""
    return {k: v for k, v in row.items() if not (str(k).lower() in MEDIA and str(k).lower().startswith(COLUMNS[1]))}


def _message(row: object, column: str) -> dict:
    if not isinstance(row, dict):
        raise TypeError(f"{column} must be a list of messages, but holds {type(row).__name__}")
    role, content = row.get("role", row.get("from")), row.get("content", row.get("value"))
    if role not in _ROLES:
        raise ValueError(f"{column}: unknown role {role!r:.40}; there are {', '.join(_ROLES)}")
    if has_media(row):
        raise SkipRow(WITH_MEDIA)
    calls = calls_of(row, content, column)
    if role == "function_call" or (content is None and calls):
        content = ""
    if _ROLES[role] == "tool":
        content = result_of(content)
    thoughts, images = {}, []
    if isinstance(content, list):  # parts
        thinking = [p.get("thinking") for p in content if isinstance(p, dict) and p.get("type") == "thinking"]
        if thinking:  # Mistral's, whose thoughts may have parts themselves
            thoughts = {THOUGHT_FIELDS[0]: "".join(map(_thought, thinking))}
        images = [source_of(part) for part in content if is_image(part)]
        content = "".join(IMAGE if is_image(part) else _words(part).replace(IMAGE, "\ufffd") for part in content
                          if not (isinstance(part, dict) and part.get("type") == "thinking"))
    if not isinstance(content, str):
        raise TypeError(f"{column}: the content of a message must be a string, not {type(content).__name__}")
    rest = without_nulls({k: v for k, v in row.items() if k not in _READ}) | thoughts
    rest = {k: v for k, v in rest.items() if k != IMAGES} | ({IMAGES: images} if images else {})
    more = {} if _is_trained(row, column) or _ROLES[role] != "assistant" else {"weight": 0}
    return {"role": _ROLES[role], "content": clean(content), **rest, **({"tool_calls": calls} if calls else {}), **more}


def is_untrained(message: dict) -> bool:
    """Whether a converted message is marked as not to be trained."""
    return message.get("weight") == 0


def _is_trained(row: dict, column: str) -> bool:
    """Whether no key of a message marks it as not trained. Raises ValueError for a fraction."""
    marks = {name: _MARKS.get(str(row[name]).strip().lower()) for name in _TRAINED if row.get(name) is not None}
    for name, mark in marks.items():
        if mark is None:
            raise ValueError(f"{column}: {name} of a message must be 0 or 1 (false or true), not {row[name]!r:.40}")
    return all(marks.values())


def _thought(thinking: object) -> str:
    return clean("".join(map(_words, thinking)) if isinstance(thinking, list) else str(thinking))


def _words(part: object) -> str:
    """The text of a part of a message. Raises SkipRow for video and audio, which are not supported."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise SkipRow("a message with parts that are not text")
    return text


def clean(text: str) -> str:
    """The text with lone surrogates, which no tokenizer can read, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


class Plain(str):
    """A string that stays as it is, even where it looks like a transcript (data.raw)."""


def is_transcript(text: object) -> bool:
    """Whether a string is an HH transcript: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    return (isinstance(text, str) and not isinstance(text, Plain) and text.lstrip().startswith("Human:")
            and "\n\nAssistant:" in text)


def parse_transcript(text: str, is_prompt: bool = False) -> list[dict]:
    """An HH transcript as messages. In a prompt, a last "Assistant:" without text is left out."""
    pieces = _TURN.split("\n\n" + text.lstrip())[1:]
    messages = [{"role": "user" if speaker == "Human" else "assistant", "content": content.strip()}
                for speaker, content in zip(pieces[::2], pieces[1::2], strict=True)]
    is_open = messages[-1] == assistant("") and text.rstrip().endswith("Assistant:")
    return messages[:-1] if is_prompt and is_open else messages


def common_prompt(chosen: list[dict], rejected: list[dict]) -> tuple[list[dict], list[dict], list[dict]]:
    """Two conversations -> their common prefix, and the rest of each, which must begin with an assistant turn.

    The prefix ends with a user turn; equal conversations are split at the last assistant turn.
    """
    shared = min(num_shared(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if any(turns[shared]["role"] != "assistant" for turns in (chosen, rejected)):
        raise SkipRow("the two conversations do not part at an answer")
    if shared == 0:
        raise SkipRow("the two conversations share no prompt")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Two texts -> their common prefix, cut at the end of a word, and the rest of each.

    Without a common prefix the prompt is "": the pair compares two texts as a whole.
    """
    shared = num_shared(chosen, rejected)
    if shared == len(chosen) == len(rejected):
        raise SkipRow("the two answers are the same")
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    shared -= 1 if shared and chosen[shared - 1] == " " else 0  # the space belongs to the answer's first token
    return chosen[:shared], chosen[shared:], rejected[shared:]


def with_tools(messages: Text | None, tools: list[dict]) -> Text | None:
    """Messages with the available tools in the first; a string unchanged."""
    if not isinstance(messages, list) or not messages or not tools:
        return messages
    return [{**messages[0], "tools": tools}, *messages[1:]]


def tools_of(tools: object, column: str = "tools") -> list[dict]:
    """The schemas of a row's tools, of which the list or each one may be JSON text; empty for null or "".

    Raises TypeError or ValueError, which names the column, for anything that is not a list of schemas.
    """
    parsed = _parsed(tools) if isinstance(tools, str) and tools.strip() else tools
    if not parsed or (isinstance(parsed, str) and not parsed.strip()):
        return []
    schemas = [_parsed(tool) for tool in parsed] if isinstance(parsed, list) else []
    if not schemas or not all(isinstance(tool, dict) for tool in schemas):
        raise TypeError(f"{column} must be a list of tool schemas, not {tools!r:.40}")
    return [_wrapped(without_nulls(tool)) for tool in schemas]


def kwargs_of(kwargs: object) -> dict:
    """The variables of the chat template that a row sets: a mapping, or its JSON text. SkipRow for anything else."""
    parsed = without_nulls(_parsed(kwargs) or {})
    if not isinstance(parsed, dict):
        raise SkipRow("chat_template_kwargs that are not a mapping")
    return parsed


def calls_of(message: dict, content: object, column: str) -> list[dict]:
    """The tool calls of a message: its `tool_calls`; OpenAI's older `function_call`; or `content`, where the role of
    the message is LLaMA-Factory's function_call. Each may be JSON text.

    Raises TypeError, which names the column, for anything that is not a call, SkipRow for arguments that are not a JSON
    object.
    """
    calls = message.get("tool_calls") or message.get("function_call")
    if not calls and message.get("role", message.get("from")) == "function_call":
        calls = _parsed(content)
        if not isinstance(calls, dict | list):
            raise SkipRow("a function_call that is not a JSON object")
    calls = _parsed(calls) or []
    if not isinstance(calls, dict | list):
        raise TypeError(f"{column}: tool_calls must be a list of tool calls, not {type(calls).__name__}")
    return [_call(call, column) for call in ([calls] if isinstance(calls, dict) else calls)]


def result_of(content: object) -> object:
    """The result of a tool as text or text in parts: anything else as JSON, as environments do."""
    is_parts = isinstance(content, list) and content and all(
        is_image(part) or (isinstance(part, dict) and isinstance(part.get("text"), str)) for part in content)
    return content if isinstance(content, str) or is_parts else json.dumps(without_nulls(content), ensure_ascii=False)


def without_nulls(value: object) -> object:
    """A JSON value with texts cleaned and without keys that are null: tables give every row the keys of all rows."""
    if isinstance(value, dict):
        return {clean(str(k)): without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, str):
        return clean(value)
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def _call(call: object, column: str) -> dict:
    """A call with its arguments as an object; arguments in JSON text keep their nulls."""
    call = _parsed(call)
    if not isinstance(call, dict):
        raise TypeError(f"{column}: a tool call must be an object, not {type(call).__name__}")
    call = _wrapped(without_nulls(call))
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TypeError(f"{column}: a tool call needs the name of its function")
    arguments = function.get("arguments", {})
    arguments = (_parsed(arguments) if arguments.strip() else {}) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise SkipRow(NO_OBJECT)
    return {**call, "function": {**function, "arguments": arguments}}


def _wrapped(value: dict) -> dict:
    """A tool or a call in OpenAI's form: the function's keys inside `function`, an id beside it."""
    if "function" in value or "name" not in value:
        return value
    outer = {k: v for k, v in value.items() if k in ("id", "type")}
    return {"type": "function", **outer, "function": {k: v for k, v in value.items() if k not in outer}}


def _parsed(value: object) -> object:
    """The value of JSON text; other text, and any other value, unchanged."""
    try:
        return loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
