"""The text of an answer that may call tools: a call is no text, so nothing is given out that may be one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybrid_rlhf.inference.response_text import AnswerText, overlap
from hybrid_rlhf.models.template import dialect_of, special_ids, stripped_marks


class TurnText:
    """An answer's text in pieces, up to where a tool call begins. White space before that is held back too.

    prompt: the text before it, which may open a thought; nothing in a thought is a call. ids: the tokens read, without
    those that completed a stop string. held: the text that was not given out, after the last token.
    """

    def __init__(self, tokenizer, text: AnswerText, prompt: str) -> None:  # noqa: ANN001
        self._open, self._close = stripped_marks(tokenizer)
        self._is_thinking = prompt.rstrip().endswith(self._open)
        self._text, self._sign = text, dialect_of(tokenizer).call_sign or ""
        self._sign_id = special_ids(tokenizer).get(self._sign)
        self._has_begun = False
        self._given: list[str] = []
        self.ids: list[int] = []
        self.held = ""

    @property
    def has_stopped(self) -> bool:
        return self._text.has_stopped

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """The text that is certain to be in no call."""
        out = ""
        for token in tokens:
            self._has_begun |= token == self._sign_id and not self._is_thinking
            out += self._certain(self._text.push([token]))
            if self.has_stopped:
                return out
            self.ids.append(token)
        return out + self._certain(self._text.push([], is_last))

    def behind_calls(self, content: str) -> str:
        """What is yet to be given out of the content of a turn with calls: text behind them."""
        given = "".join(self._given).rpartition(self._close)[2].strip()
        rest = content[len(given) :].strip() if content.startswith(given) else ""
        return f"\n{rest}" if rest and given else rest

    def _certain(self, piece: str) -> str:
        self.held += piece
        if self._has_begun or not piece or (not self._given and self._open.startswith(self.held.lstrip())):
            return ""
        at = self._begin()
        given, self.held = self.held[:at], self.held[at:]
        self._given += [given] if given else []
        return given

    def _begin(self) -> int:
        """Where in the held text a call begins, or may begin."""
        text = self.held
        start = self._thought_end()
        if self._is_thinking:
            at = start
        elif self._sign in ("[", "{"):
            at, self._has_begun = _json_begin(text, start)
        else:
            at = text.find(self._sign, start) if self._sign else -1
            self._has_begun = at >= 0
            at = at if self._has_begun else len(text) - overlap(text[start:], self._sign)
        return len(text[:at].rstrip())

    def _thought_end(self) -> int:
        """Where in the held text what is certain to be thought ends."""
        text = self.held
        if not self._given:
            self._is_thinking |= text.lstrip().startswith(self._open)
        if not self._is_thinking:
            return 0
        end = text.find(self._close)
        self._is_thinking = end < 0
        return end + len(self._close) if end >= 0 else len(text) - overlap(text, self._close)


def _json_begin(text: str, start: int) -> tuple[int, bool]:
    """Where JSON without a marker begins or may begin, and whether it has: an object with a name, or a list of them."""
    for bracket in re.compile(r"[\[{]").finditer(text, start):
        opening = "".join(text[bracket.start() :].split())
        if opening.startswith(('{"', '[{"')) or opening in ("[", "{", "[{"):
            return bracket.start(), '"' in opening
    return len(text), False
