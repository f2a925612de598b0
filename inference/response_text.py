"""Streaming text of an answer: stop strings, and tool calls removed."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence

from hybrid_rlhf.models.detokenizer import IncrementalDetokenizer
from hybrid_rlhf.models.template import dialect_of, special_ids, stripped_marks
from hybrid_rlhf.models.tokenizer import answer_frame


class AnswerText:
    """One answer's text, in pieces. Text that may begin a stop string is held back.

    before: the tokens before the answer, if both are one text and not separate turns. is_turn: it is an answer in a
    conversation, and the chat template's frame around it is left out.
    has_stopped: a stop string occurred; it and the rest are not part of the text. num_tokens: tokens read, without
    those in `ends`, which end a response and have no text. offsets: where the text of each of these tokens begins; a
    token that is part of a character begins where the previous character ends. length: characters returned so far.
    """

    def __init__(self, tokenizer, stops: Sequence[str], ends: Collection[int],  # noqa: ANN001
                 before: Sequence[int] = (), is_turn: bool = True) -> None:
        self._lead, behind = answer_frame(tokenizer) if is_turn else ("", frozenset())
        self._text, self._stops = IncrementalDetokenizer(tokenizer, before=before), tuple(stops)
        self._ends = frozenset(ends) | behind
        self._begun = self._held = ""
        self.has_stopped = False
        self.offsets: list[int] = []
        self.length = 0

    @property
    def num_tokens(self) -> int:
        return len(self.offsets)

    def num_said(self, is_over: bool) -> int:
        """Number of tokens that begin in the returned text; all, if the answer is over without a stop string."""
        return len(self.offsets) if is_over and not self.has_stopped else bisect_left(self.offsets, self.length)

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """The text that is certain after `tokens`; with is_last all the rest."""
        out = ""
        for token in tokens:
            if self.has_stopped:
                break
            if token not in self._ends:
                self.offsets.append(self.length + len(out) + len(self._held))
                out += self._certain(self._behind_lead(self._text.push(token)))
        if is_last and not self.has_stopped:
            out += self._certain(self._behind_lead(self._text.flush(), is_last=True))
            out, self._held = out + self._held, ""
        self.length += len(out)
        return out

    def _behind_lead(self, piece: str, is_last: bool = False) -> str:
        """The text without its lead; text that may begin the lead is held back."""
        if not self._lead:
            return piece
        self._begun += piece
        if not is_last and len(self._begun) < len(self._lead) and self._lead.startswith(self._begun):
            return ""
        text, self._lead = self._begun.removeprefix(self._lead), ""
        return text

    def _certain(self, piece: str) -> str:
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        start = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=-1)
        if start >= 0:
            self.has_stopped, self._held = True, ""
            return text[:start]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def pieces(text, tokens: Iterable[int]) -> Iterator[str]:  # noqa: ANN001 - AnswerText or one that reads it
    """The pieces of text that `text` returns for a stream of token ids."""
    for token in tokens:
        if piece := text.push([token]):
            yield piece
    if piece := text.push([], is_last=True):
        yield piece


class TurnText:
    """An answer's text in pieces, up to its first tool call. White space before that is held back too.

    prompt: the text before the answer, which may open a thought; thoughts contain no calls. ids: the tokens read,
    without those that completed a stop string. held: the text held back, after the last token.
    """

    def __init__(self, tokenizer, text: AnswerText, prompt: str) -> None:  # noqa: ANN001
        self._open, self._close = stripped_marks(tokenizer)
        self._is_thinking = prompt.rstrip().endswith(self._open)
        self._text, self._sign = text, dialect_of(tokenizer).call_sign or ""
        self._sign_id = special_ids(tokenizer).get(self._sign)
        self._has_begun = False
        self._pieces: list[str] = []
        self.ids: list[int] = []
        self.held = ""

    @property
    def has_stopped(self) -> bool:
        return self._text.has_stopped

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """The text that is certainly outside of calls."""
        out = ""
        for token in tokens:
            self._has_begun |= token == self._sign_id and not self._is_thinking
            out += self._certain(self._text.push([token]))
            if self.has_stopped:
                return out
            self.ids.append(token)
        return out + self._certain(self._text.push([], is_last))

    def behind_calls(self, content: str) -> str:
        """The rest of the content of a turn with calls: text after them."""
        before = "".join(self._pieces).rpartition(self._close)[2].strip()
        rest = content[len(before) :].strip() if content.startswith(before) else ""
        return f"\n{rest}" if rest and before else rest

    def _certain(self, piece: str) -> str:
        self.held += piece
        if self._has_begun or not piece or (not self._pieces and self._open.startswith(self.held.lstrip())):
            return ""
        at = self._begin()
        piece, self.held = self.held[:at], self.held[at:]
        self._pieces += [piece] if piece else []
        return piece

    def _begin(self) -> int:
        """Index in the held text at which a call begins, or may begin."""
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
        """Index in the held text at which the certain part of a thought ends."""
        text = self.held
        if not self._pieces:
            self._is_thinking |= text.lstrip().startswith(self._open)
        if not self._is_thinking:
            return 0
        end = text.find(self._close)
        self._is_thinking = end < 0
        return end + len(self._close) if end >= 0 else len(text) - overlap(text, self._close)


def _json_begin(text: str, start: int) -> tuple[int, bool]:
    """Where JSON without a marker begins or may begin, and whether it has begun: an object with a name, or a list."""
    for bracket in re.compile(r"[\[{]").finditer(text, start):
        opening = "".join(text[bracket.start() :].split())
        if opening.startswith(('{"', '[{"')) or opening in ("[", "{", "[{"):
            return bracket.start(), '"' in opening
    return len(text), False
