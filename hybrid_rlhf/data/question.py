"""The question of a row: which columns carry it, and how they become one prompt, alike for every format.

Text columns are joined by an empty line in the order of PARTS, as Alpaca joins instruction and input; the system column
becomes the system message; a history, or messages in one of the columns, become the turns before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybrid_rlhf.data import transcripts
from hybrid_rlhf.data.messages import messages_of, parsed_messages
from hybrid_rlhf.data.transcripts import assistant, clean, user
from hybrid_rlhf.data.turns import Text

SYSTEM = ("system", "system_prompt")
PARTS = ("instruction", "prompt", "context", "passage", "input", "question", "query", "problem", "history")
_BESIDE_TURNS = ("context", "passage")  # messages are the whole question but for these, and the system text
# last words of the names of columns that hold a question, for a message to the user
_LIKE_A_PROMPT = {*PARTS, "instructions", "prompts", "questions", "queries", "inputs", "request", "post", "user",
                  "human", "conversation", "conversations", "dialog", "dialogue", "messages"}


class Question(NamedTuple):
    """text: a string where only a prompt and columns joined to it are there, messages otherwise; None without any.
    joined: the text columns as one string; used: the columns that are in it."""

    text: Text | None
    joined: str
    used: tuple[str, ...]


def question_of(row: Mapping, needed: Sequence[str]) -> Question:
    """needed: the columns that must be text or messages, where they are there; `prompt` is read only if it is one, for
    beside others it is often all of the text, answer included.

    Raises TypeError that names the column for a needed one of another type.
    """
    parts = {name: part for name in PARTS if (name != "prompt" or name in needed)
             and (part := _part(row.get(name), name, name in needed)) is not None}
    if isinstance(parts.get("prompt"), list):
        return beside(parts["prompt"], row, ["prompt"])
    turns = [turn for part in parts.values() if isinstance(part, list) for turn in part]
    texts: dict[str, str] = {}
    for name, part in parts.items():
        if isinstance(part, str) and part.strip() and part not in texts.values() and (
                name == "prompt" or not _holds(parts.get("prompt", ""), part)):
            texts[name] = part
    joined = "\n\n".join(texts.values())
    if isinstance(parts.get("prompt"), str) and not turns and not _system_of(row, turns)[0]:
        return Question(joined, joined, _used(row, joined, texts))
    asked = [user(joined)] if joined or (not turns and parts) else []
    names = [name for name, part in parts.items() if name in texts or isinstance(part, list)]
    return _with_system([*turns, *asked], row, joined, names)


def beside(messages: list[dict], row: Mapping, used: Sequence[str] = ()) -> Question:
    """Messages that are the question, with the columns that may stand beside them: system text, and context, which goes
    into the first user turn. used: the columns that the messages are from."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    for name in _BESIDE_TURNS if first is not None else ():
        part = row.get(name)
        if isinstance(part, str) and part.strip() and not _holds(flat(messages), part):
            asked = {**messages[first], "content": f"{messages[first]['content']}\n\n{clean(part)}"}
            messages, used = [*messages[:first], asked, *messages[first + 1 :]], [*used, name]
    return _with_system(messages, row, "", used)


def _with_system(messages: list[dict], row: Mapping, joined: str, used: Sequence[str]) -> Question:
    column, system = _system_of(row, messages)
    if system:
        messages, used = [{"role": "system", "content": system}, *messages], [column, *used]
    return Question(messages or None, joined, _used(row, flat(messages), used))


def _used(row: Mapping, text: str, names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a question that are in its text: those put there, and those whose text was there already."""
    more = [n for n in (*SYSTEM, *PARTS) if n not in names and isinstance(row.get(n), str) and _holds(text, row[n])]
    return (*names, *more)


def _system_of(row: Mapping, messages: list[dict]) -> tuple[str, str]:
    """The column with a system text, and the text; nothing beside messages that have one."""
    if messages and messages[0]["role"] == "system":
        return "", ""
    return next(((name, clean(row[name])) for name in SYSTEM if isinstance(row.get(name), str) and row[name].strip()),
                ("", ""))


def _part(value: object, column: str, is_needed: bool) -> Text | None:
    """A column's text, or messages: those of a transcript, of JSON text, of a history of [question, answer] pairs."""
    if isinstance(value, str):
        if column == "prompt" and transcripts.is_transcript(value):
            return transcripts.parse(value, is_prompt=True)
        parsed = parsed_messages(value, column)
        return parsed if parsed else clean(value)
    if isinstance(value, dict) and (is_needed or "role" in value):
        return messages_of([value], column)
    if isinstance(value, list) and value and all(_is_pair(each) for each in value):
        return [turn for asked, said in value for turn in (user(clean(asked)), assistant(clean(said)))]
    if isinstance(value, list) and (is_needed or (value and all(isinstance(m, dict) and "role" in m for m in value))):
        return messages_of(value, column)
    if is_needed and value is not None:
        raise TypeError(f"{column} must be a string or a list of messages, not {type(value).__name__}")
    return None


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def flat(text: Text | None) -> str:
    """All that is said, as one string."""
    return text if isinstance(text, str) else "\n".join(m["content"] for m in text or ())


def _holds(text: str, part: str) -> bool:
    return " ".join(clean(part).split()) in " ".join(text.split())


def looks_like_a_prompt(column: str) -> bool:
    """Whether a column's name says that it holds a question: user_prompt, Question, input_text."""
    words = "".join(c if c.isalnum() else " " for c in column).lower().split()
    words = words[:-1] if words[-1:] in (["text"], ["content"], ["body"]) else words
    return bool(words) and words[-1] in _LIKE_A_PROMPT
