"""The text of an answer that may call tools: a call is no text, so nothing is given out that may be one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hybrid_rlhf.inference.response_text import AnswerText, overlap
from hybrid_rlhf.models.template import dialect_of, special_ids

# JSON that stands without a marker: an object begins with a name, and its beginning may be all that there is.
_JSON = re.compile(r'\[?\s*\{\s*"|\[?\s*(\{\s*)?\Z')


class TurnText:
    """An answer's text in pieces, up to where a tool call begins. White space before that is held back too.

    ids: the tokens read, without those that completed a stop string. held: the text that was not given out, after the
    last token.
    """

    def __init__(self, tokenizer, text: AnswerText) -> None:  # noqa: ANN001
        self._text, self._sign = text, dialect_of(tokenizer).call_sign or ""
        self._sign_id = special_ids(tokenizer).get(self._sign)
        self._has_begun = False
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
        return given

    def _begin(self) -> int:
        """Where in the held text a call begins, or may begin."""
        text = self.held
        if self._sign in ("[", "{"):
            at = _JSON.search(text).start()
            self._has_begun = '"' in text[at:]
        else:
            at = text.find(self._sign) if self._sign else -1
            self._has_begun = at >= 0
            at = at if self._has_begun else len(text) - overlap(text, self._sign)
        return len(text[:at].rstrip())
