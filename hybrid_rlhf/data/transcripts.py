"""Conversations as others write them down, as lists of {"role", "content"}; and where two of them part."""

from __future__ import annotations

import re

from hybrid_rlhf.data.files import loads
from hybrid_rlhf.data.turns import SkipRow, Text

_ROLES = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant",
          "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system",
          "tool": "tool", "function": "tool", "observation": "tool", "function_call": "assistant",
          "developer": "developer"}
_TURN = re.compile(r"\n\n(Human|Assistant):")


def clean(text: str) -> str:
    """The text with lone surrogates, which no tokenizer can read, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


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
    if isinstance(content, list):  # parts, of which only text can be read
        content = "".join(p.get("text") or "" for p in content if isinstance(p, dict))
    if content is None and row.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise TypeError(f"{column}: the content of a message must be a string, not {type(content).__name__}")
    rest = {k: v for k, v in row.items() if k not in ("role", "from", "content", "value") and v is not None}
    if rest.get("tool_calls"):
        rest["tool_calls"] = [_tool_call(call, column) for call in rest["tool_calls"]]
    return {"role": _ROLES[role], "content": clean(content), **rest}


def _tool_call(call: object, column: str) -> dict:
    """A tool call whose arguments are an object, also where they were JSON text."""
    if not isinstance(call, dict):
        raise TypeError(f"{column}: a tool call must be an object, not {type(call).__name__}")
    call = without_nulls(call)
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"], column)}
    try:
        given = loads(call["arguments"]) if isinstance(call.get("arguments"), str) else None
    except (ValueError, RecursionError):
        given = None
    return {**call, "arguments": given} if isinstance(given, dict) else call


def without_nulls(value: object) -> object:
    """A JSON value without keys that hold null: tables give every row the keys of all rows."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def with_tools(messages: Text | None, tools: object, column: str = "tools") -> Text | None:
    """Messages of which the first carries the tools that may be called: schemas, or the JSON text of them."""
    if not isinstance(messages, list):
        return messages
    if isinstance(tools, str) and tools.strip():
        try:
            tools = loads(tools)
        except (ValueError, RecursionError):
            raise ValueError(f"{column} must be a list of tool schemas, not {tools!r:.40}") from None
    if not tools or not messages:
        return messages
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TypeError(f"{column} must be a list of tool schemas")
    return [{**messages[0], "tools": without_nulls(tools)}, *messages[1:]]


def is_transcript(text: object) -> bool:
    """Whether a string is an HH transcript: "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    return isinstance(text, str) and text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def parse(text: str, is_prompt: bool = False) -> list[dict]:
    """An HH transcript as messages. In a prompt, a last "Assistant:" with nothing behind it is no message."""
    pieces = _TURN.split("\n\n" + text.lstrip())[1:]
    messages = [{"role": "user" if who == "Human" else "assistant", "content": said.strip()}
                for who, said in zip(pieces[::2], pieces[1::2], strict=True)]
    is_open = messages[-1] == assistant("") and text.rstrip().endswith("Assistant:")
    return messages[:-1] if is_prompt and is_open else messages


def common_prompt(chosen: list[dict], rejected: list[dict]) -> tuple[list[dict], list[dict], list[dict]]:
    """Two conversations -> what they share, and what follows in each, which must begin with an assistant turn.

    A shared beginning ends at a user turn; if the two conversations are one, they part at the last assistant turn.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if any(turns[shared]["role"] != "assistant" for turns in (chosen, rejected)):
        raise SkipRow("the two conversations do not part at an answer")
    if shared == 0:
        raise SkipRow("the two conversations share no prompt")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Two texts -> their shared beginning, cut back to the end of a word, and the rest of each.

    Two texts that begin differently have no prompt (""): the pair says which of two texts is the better one.
    """
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):
        raise SkipRow("the two answers are the same")
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    shared -= 1 if shared and chosen[shared - 1] == " " else 0  # the space belongs to the answer's first token
    return chosen[:shared], chosen[shared:], rejected[shared:]
