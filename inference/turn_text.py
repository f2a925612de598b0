"""The text of an answer that may call tools: a call is no text, so nothing is given out that may be one."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_rlhf.inference.response_text import AnswerText, overlap
from hybrid_rlhf.models.template import CLOSE, dialect_of, special_ids

BRACKETS = ("[", "{")  # of JSON that stands without a marker, which is a call only where it is the whole answer


class TurnText:
    """An answer's text in pieces, up to where a tool call begins. White space before that is held back too.

    ids: the tokens read, without those that completed a stop string. held: the text that was not given out, after the
    last token.
    """

    def __init__(self, tokenizer, text: AnswerText) -> None:  # noqa: ANN001
        self._text, self._sign = text, dialect_of(tokenizer).call_sign or ""
        self._sign_id = special_ids(tokenizer).get(self._sign)
        self._has_begun = False
        self._said = ""  # the end of what was given out since the thought
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
            self._has_begun |= token == self._sign_id
            out += self._certain(self._text.push([token]))
            if self.has_stopped:
                return out
            self.ids.append(token)
        return out + self._certain(self._text.push([], is_last))

    def _certain(self, piece: str) -> str:
        self.held += piece
        if self._has_begun or not piece:
            return ""
        at = self._begin()
        given, self.held = self.held[:at], self.held[at:]
        self._said = (self._said + given).rpartition(CLOSE)[2][-len(CLOSE) :]
        return given

    def _begin(self) -> int:
        """Where in the held text a call begins, or may begin."""
        text, at = self.held, -1
        if self._sign in BRACKETS:
            before = self._said + text
            answer = before.rpartition(CLOSE)[2].lstrip() if CLOSE in before or not self._said else ""
            at = len(text) - len(answer) if answer.startswith(self._sign) else at
        elif self._sign:
            at = text.find(self._sign)
        self._has_begun = at >= 0
        if at < 0:
            at = len(text) - (0 if self._sign in BRACKETS else overlap(text, self._sign))
        return len(text[:at].rstrip())
