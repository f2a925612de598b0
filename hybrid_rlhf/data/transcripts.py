"""Conversations in plain text as lists of {"role", "content"}; and where two of them part."""

from __future__ import annotations

import re

from hybrid_rlhf.data.turns import SkipRow

_TURN = re.compile(r"\n\n(Human|Assistant):")


def clean(text: str) -> str:
    """The text with lone surrogates, which no tokenizer can read, replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


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
