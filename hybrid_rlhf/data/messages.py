"""Conversations as others write them down, as lists of {"role", "content"}."""

from __future__ import annotations

import re

from hybrid_rlhf.data.files import loads
from hybrid_rlhf.data.tool_columns import calls_of, result_of, without_nulls
from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.data.turns import SkipRow
from hybrid_rlhf.models.thoughts import THOUGHT_FIELDS

_ROLES = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
          "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system",
          "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
          "developer": "developer"}
# whether a message is trained, as OpenAI, axolotl, LLaMA-Factory's and ms-swift's users write it
_TRAINED = ("weight", "train", "training", "trainable", "loss_mask", "loss")
_MARKS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
_OFTEN_MESSAGES = ("prompt", "chosen", "rejected", "messages")
_READ = ("role", "from", "content", "value", "tool_calls", "function_call", *_TRAINED)  # the rest is handed on as it is
MEDIA = frozenset(f"{kind}{ending}" for kind in ("image", "video", "audio") for ending in (
    "", "s", "_url", "_urls", "_path", "_paths"))
WITH_MEDIA = "a row with images, video or audio (only text is read)"


def messages_of(rows: list, column: str) -> list[dict]:
    """Messages with our role names, from {"role", "content"} or ShareGPT's {"from", "value"}.

    Raises TypeError or ValueError that names the column for what is no message.
    """
    if not rows:
        raise SkipRow(f"empty {column}")
    if all(isinstance(row, dict) and {"input", "output"} <= row.keys() for row in rows):  # Capybara's turns
        rows = [{"role": role, "content": row[key]} for row in rows
                for role, key in (("user", "input"), ("assistant", "output"))]
    return [_message(row, column) for row in rows]


def parsed_messages(text: str, column: str, is_answer: bool = False) -> list[dict] | None:
    """The messages that the whole of `text` is the JSON of, as a table has them, an answer's with one of the assistant;
    None for any other text. Raises ValueError for messages as Python prints them, in a column that often has them."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        rows = loads(text)
    except (ValueError, RecursionError):
        if column in _OFTEN_MESSAGES and re.fullmatch(
                r"\s*\[\s*\{\s*'(role|from|content|value)':.*\}\s*\]\s*", text, re.DOTALL):
            raise ValueError(f"{column} holds messages as Python prints them; write JSON") from None
        return None
    rows = [rows] if isinstance(rows, dict) else rows
    is_of_messages = isinstance(rows, list) and rows and all(
        isinstance(row, dict) and ({"role", "content"} <= row.keys() or {"from", "value"} <= row.keys())
        and row.get("role", row.get("from")) in tuple(_ROLES) for row in rows)
    found = messages_of(rows, column) if is_of_messages else []
    return found if not is_answer or any(m["role"] == "assistant" for m in found) else None


def has_media(row: dict) -> bool:
    """Whether a key of a row, or of a message, holds pictures, videos or sounds."""
    return any(value and ((str(name).lower() in MEDIA and _is_filled(value))
                          or (isinstance(value, dict) and str(value.get("type")) in MEDIA))
               for name, value in row.items())


def _is_filled(value: object) -> bool:
    """Whether there is more than None and empty strings in it."""
    if isinstance(value, dict | list):
        return any(map(_is_filled, value.values() if isinstance(value, dict) else value))
    return value is not None and (not isinstance(value, str) or value.strip().lower() not in ("", "none", "null"))


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
    thoughts = {}
    if isinstance(content, list):  # parts
        thinking = [p.get("thinking") for p in content if isinstance(p, dict) and p.get("type") == "thinking"]
        if thinking:  # Mistral's, whose thoughts may be parts again
            thoughts = {THOUGHT_FIELDS[0]: "".join(map(_thought, thinking))}
        content = "".join(_words(part) for part in content
                          if not (isinstance(part, dict) and part.get("type") == "thinking"))
    if not isinstance(content, str):
        raise TypeError(f"{column}: the content of a message must be a string, not {type(content).__name__}")
    rest = without_nulls({k: v for k, v in row.items() if k not in _READ}) | thoughts
    more = {} if _is_trained(row, column) or _ROLES[role] != "assistant" else {"weight": 0}
    return {"role": _ROLES[role], "content": clean(content), **rest, **({"tool_calls": calls} if calls else {}), **more}


def is_untrained(message: dict) -> bool:
    """Whether a message that was read is marked as not to be trained."""
    return message.get("weight") == 0


def _is_trained(row: dict, column: str) -> bool:
    """Whether none of a message's marks says that it is not trained. Raises ValueError for a mark between the two."""
    marks = {name: _MARKS.get(str(row[name]).strip().lower()) for name in _TRAINED if row.get(name) is not None}
    for name, mark in marks.items():
        if mark is None:
            raise ValueError(f"{column}: {name} of a message must be 0 or 1 (false or true), not {row[name]!r:.40}")
    return all(marks.values())


def _thought(thinking: object) -> str:
    return clean("".join(map(_words, thinking)) if isinstance(thinking, list) else str(thinking))


def _words(part: object) -> str:
    """The text of a part of a message. Raises SkipRow for a picture or a sound, which no message here can hold."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise SkipRow("a message with parts that are no text")
    return text
