"""Conversations as others write them down, as lists of {"role", "content"}."""

from __future__ import annotations

from hybrid_rlhf.data.tool_columns import calls_of, result_of, without_nulls
from hybrid_rlhf.data.transcripts import clean
from hybrid_rlhf.data.turns import SkipRow
from hybrid_rlhf.models.thoughts import THOUGHT_FIELDS

_ROLES = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
          "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system",
          "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
          "developer": "developer"}
_READ = ("role", "from", "content", "value", "tool_calls", "function_call")  # what is left is handed on as it is


def messages_of(rows: list, column: str) -> list[dict]:
    """Messages with our role names, from {"role", "content"} or ShareGPT's {"from", "value"}.

    Raises TypeError or ValueError that names the column for what is no message.
    """
    if not rows:
        raise SkipRow(f"empty {column}")
    return [_message(row, column) for row in rows]


def _message(row: object, column: str) -> dict:
    if not isinstance(row, dict):
        raise TypeError(f"{column} must be a list of messages, but holds {type(row).__name__}")
    role, content = row.get("role", row.get("from")), row.get("content", row.get("value"))
    if role not in _ROLES:
        raise ValueError(f"{column}: unknown role {role!r:.40}; there are {', '.join(_ROLES)}")
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
    return {"role": _ROLES[role], "content": clean(content), **rest, **({"tool_calls": calls} if calls else {})}


def _thought(thinking: object) -> str:
    return clean("".join(map(_words, thinking)) if isinstance(thinking, list) else str(thinking))


def _words(part: object) -> str:
    """The text of a part of a message. Raises SkipRow for a picture or a sound, which no message here can hold."""
    text = part.get("text") if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise SkipRow("a message with parts that are no text")
    return text
