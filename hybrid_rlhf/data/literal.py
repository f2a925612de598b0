"""Text of a message that only looks like a control token.

A template's markers are text as well, and a tokenizer makes a special token of whatever reads like one. So a user who
writes <|im_end|> would end their own turn and begin another, as system or as assistant. Here such text is broken in
two before a template sees it, and the two parts are tokenized apart: the same characters, as ordinary tokens. That is
so of the assistant's own text too, which may quote a user's.

The markers of thoughts (<think>) control nothing, and are the tokens that transformers makes of them, whoever writes
them; and so are the markers of tool calls in what the assistant says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from weakref import WeakKeyDictionary

from hybrid_rlhf.models import template
from hybrid_rlhf.models.thoughts import words_of

BREAK = "\ufdd0"  # a noncharacter, which Unicode keeps for a program's own use: no text may hold it
_known: WeakKeyDictionary = WeakKeyDictionary()  # tokenizer -> (what they depend on, its control tokens)


def control_tokens(tokenizer, is_own: bool = False) -> tuple[str, ...]:  # noqa: ANN001
    """The texts that `tokenizer` reads as special tokens, longest first, without the markers of thoughts; is_own: in
    what the assistant says itself, where the markers of tool calls are none either."""
    size = len(tokenizer.get_added_vocab()) if not hasattr(tokenizer, "__len__") else len(tokenizer)
    key = (size, getattr(tokenizer, "chat_template", None), *map(str, tokenizer.all_special_tokens))
    if tokenizer not in _known or _known[tokenizer][0] != key:
        texts = {str(t) for t in tokenizer.all_special_tokens}
        texts |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
        texts = {t for t in texts if len(t) > 1}.difference(words_of(), words_of([template.stripped_marks(tokenizer)]))
        others, own = (tuple(sorted(t, key=len, reverse=True)) for t in (texts, texts - template.call_words(tokenizer)))
        _known[tokenizer] = (key, others, own)
    return _known[tokenizer][1 + is_own]


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


def broken(tokenizer, text: str, is_own: bool = False) -> str:  # noqa: ANN001
    """`text` with a BREAK behind the first character of whatever would become a control token. is_own: it is what the
    assistant says."""
    text = text.replace(BREAK, "\ufffd")
    tokens = control_tokens(tokenizer, is_own)
    if not tokens:
        return text
    starts = [match.start() for match in _pattern(tokens).finditer(text)]
    edges = [0, *(start + 1 for start in starts), len(text)]
    return BREAK.join(text[a:b] for a, b in pairwise(edges)) if starts else text


def broken_messages(tokenizer, messages: Sequence[dict]) -> list[dict]:  # noqa: ANN001
    """Messages whose every text but the role is `broken`, whatever it is nested in."""

    def walk(value: object, is_own: bool) -> object:
        if isinstance(value, str):
            return broken(tokenizer, value, is_own)
        if isinstance(value, dict):
            return {walk(k, is_own): walk(v, is_own) for k, v in value.items()}
        return [walk(v, is_own) for v in value] if isinstance(value, list) else value

    return [{k: v if k == "role" else walk(v, message["role"] == "assistant" and k not in ("tool_calls", "tools"))
             for k, v in message.items()} for message in messages]


def whole(text: str) -> str:
    """The text as it was written."""
    return text.replace(BREAK, "")
