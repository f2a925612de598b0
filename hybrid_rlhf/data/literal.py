"""Text of a message that only looks like a special token.

A template's markers are text as well, and a tokenizer makes a special token of whatever reads like one. So a user who
writes <|im_end|> would end their own turn and begin another, as system or as assistant. Here such text is broken in
two before a template sees it, and the two parts are tokenized apart: the same characters, as ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from weakref import WeakKeyDictionary

BREAK = "\ufdd0"  # a noncharacter, which Unicode keeps for a program's own use: no text may hold it
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (its size, its special tokens)


def special_tokens(tokenizer) -> tuple[str, ...]:  # noqa: ANN001
    """The texts that `tokenizer` reads as special tokens, longest first."""
    size = len(tokenizer.get_added_vocab()) if not hasattr(tokenizer, "__len__") else len(tokenizer)
    found = _known.get(tokenizer)
    if found is None or found[0] != (size, *map(str, tokenizer.all_special_tokens)):
        texts = {str(t) for t in tokenizer.all_special_tokens}
        texts |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        found = ((size, *map(str, tokenizer.all_special_tokens)),
                 tuple(sorted((t for t in texts if len(t) > 1), key=len, reverse=True)))
        _known[tokenizer] = found
    return found[1]


@lru_cache(32)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern:
    return re.compile(f"(?={_branches(tokens)})")  # ahead only: one may begin inside another


def _branches(ends: Sequence[str]) -> str:
    """A regular expression of texts that begin with one of `ends`, character by character: some tokenizers have a
    thousand special tokens, and trying each of them everywhere takes as long."""
    if "" in ends:
        return ""
    following: dict[str, list[str]] = {}
    for end in ends:
        following.setdefault(end[0], []).append(end[1:])
    found = [re.escape(first) + _branches(rest) for first, rest in following.items()]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


def broken(tokenizer, text: str) -> str:  # noqa: ANN001
    """`text` with a BREAK behind the first character of whatever would become a special token."""
    text = text.replace(BREAK, "\ufffd")
    tokens = special_tokens(tokenizer)
    if not tokens:
        return text
    starts = [match.start() for match in _pattern(tokens).finditer(text)]
    edges = [0, *(start + 1 for start in starts), len(text)]
    return BREAK.join(text[a:b] for a, b in pairwise(edges)) if starts else text


def broken_messages(tokenizer, messages: Sequence[dict]) -> list[dict]:  # noqa: ANN001
    """Messages whose every text but the role is `broken`, whatever it is nested in."""

    def walk(value: object) -> object:
        if isinstance(value, str):
            return broken(tokenizer, value)
        if isinstance(value, dict):
            return {walk(k): walk(v) for k, v in value.items()}
        return [walk(v) for v in value] if isinstance(value, list) else value

    return [{k: v if k == "role" else walk(v) for k, v in message.items()} for message in messages]


def whole(text: str) -> str:
    """The text as it was written."""
    return text.replace(BREAK, "")
