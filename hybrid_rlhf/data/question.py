"""Build the question (prompt) of a row from its columns, in the same way for every format.

Text columns are joined by an empty line in the order of PARTS, as Alpaca joins instruction and input; the system column
becomes the system message; a history, or messages in one of the columns, become the turns before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybrid_rlhf.data.messages import (
    assistant,
    clean,
    is_transcript,
    messages_of,
    parse_transcript,
    parsed_messages,
    user,
)
from hybrid_rlhf.data.turns import Text

SYSTEM = ("system", "system_prompt")
PARTS = ("instruction", "prompt", "context", "passage", "input", "question", "query", "problem", "history")


class Question(NamedTuple):
    """text: a string if there are only a prompt and columns joined to it, otherwise messages; None without any. used:
    the columns it was built from."""

    text: Text | None
    used: tuple[str, ...]


def question_of(row: Mapping, needed: Sequence[str]) -> Question:
    """needed: the columns that must be text or messages, if they exist; `prompt` is read only if it is one of them,
    since beside others it is often the full text, answer included.

    Raises TypeError, which names the column, for a needed one of another type.
    """
    parts = {name: part for name in PARTS if (name != "prompt" or name in needed)
             and (part := _part(row.get(name), name, name in needed)) is not None}
    prompt = parts.get("prompt")
    if isinstance(prompt, list):
        return beside(prompt, row, ("prompt",))
    texts: dict[str, str] = {}
    for name, part in parts.items():
        if isinstance(part, str) and part.strip() and part not in texts.values() and (
                name == "prompt" or not prompt or spaced(part) not in spaced(prompt)):
            texts[name] = part
    joined, turns = "\n\n".join(texts.values()), [m for part in parts.values() if isinstance(part, list) for m in part]
    if prompt is not None and not turns and not _system_column(row):
        return Question(joined, tuple(texts))
    asked = [user(joined)] if joined or (parts and not turns) else []
    return beside([*turns, *asked], row, [name for name in parts if name in texts or isinstance(parts[name], list)])


def beside(messages: list[dict], row: Mapping, used: Sequence[str] = ()) -> Question:
    """Messages of the columns `used`, with the row's system text, and with its context added to the first user turn."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    for name in ("context", "passage") if first is not None else ():
        part = row.get(name)
        if isinstance(part, str) and part.strip() and spaced(part) not in spaced(flat(messages)):
            asked = {**messages[first], "content": f"{messages[first]['content']}\n\n{clean(part)}"}
            messages, used = [*messages[:first], asked, *messages[first + 1 :]], [*used, name]
    system = _system_column(row)
    if system and not (messages and messages[0]["role"] == "system"):
        messages, used = [{"role": "system", "content": clean(row[system])}, *messages], [system, *used]
    return Question(messages or None, tuple(used))


def _system_column(row: Mapping) -> str | None:
    return next((name for name in SYSTEM if isinstance(row.get(name), str) and row[name].strip()), None)


def _part(value: object, column: str, is_needed: bool) -> Text | None:
    """A column's text, or the messages of a transcript, of JSON text or of a history of [question, answer] pairs."""
    if isinstance(value, str):
        if column == "prompt" and is_transcript(value):
            return parse_transcript(value, is_prompt=True)
        return parsed_messages(value, column) or clean(value)
    rows = [value] if isinstance(value, dict) else value
    if isinstance(rows, list) and rows and all(
            isinstance(p, list) and len(p) == 2 and all(isinstance(text, str) for text in p) for p in rows):
        return [turn for asked, replied in rows for turn in (user(clean(asked)), assistant(clean(replied)))]
    if isinstance(rows, list) and (is_needed or (rows and all(isinstance(m, dict) and "role" in m for m in rows))):
        return messages_of(rows, column)
    if is_needed and value is not None:
        raise TypeError(f"{column} must be a string or a list of messages, not {type(value).__name__}")
    return None


def without_system(row: Mapping) -> Mapping:
    """A row without its system text, if the prompt is a string: neither a transcript nor the JSON of messages."""
    is_plain = isinstance(_part(row["prompt"], "prompt", is_needed=True), str)
    return {k: v for k, v in row.items() if not is_plain or k not in SYSTEM}


def flat(text: Text | None) -> str:
    """The contents of all messages as one string."""
    return text if isinstance(text, str) else "\n".join(m["content"] for m in text or ())


def spaced(text: str) -> str:
    """The text with white space normalised, for comparisons."""
    return " ".join(text.split())


def looks_like_a_prompt(column: str) -> bool:
    """Whether a column's name suggests a question: user_prompt, Question, input_text."""
    words = "".join(c if c.isalnum() else " " for c in column).lower().removesuffix(" text").split()
    return bool(words) and words[-1].removesuffix("s") in {*PARTS, "request", "post", "user", "human", "conversation",
                                                           "dialog", "dialogue", "message"}
