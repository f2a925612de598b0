"""The text of an answer as it comes from the engine: whole characters, cut before a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence

from hybrid_rlhf.inference.detokenizer import IncrementalDetokenizer
from hybrid_rlhf.models.tokenizer import answer_frame


class AnswerText:
    """One answer's text, given out in pieces. What may be the beginning of a stop string is held back.

    before: the tokens that it goes on from, where they are its text's beginning and no other's turn. is_turn: it is an
    answer in a conversation, and what the chat template writes around its words is left out.
    has_stopped: a stop string came; it and what follows are not part of the text. num_tokens: tokens read, without the
    ones in `ends`, which end a response and have no text. offsets: where the text of each of these tokens begins; one
    that is part of a character begins where the last whole one ends. length: characters given out.
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
        """How many of the first tokens have their text, or begin it, in what was given out; where all is over and no
        stop string came, all that were read."""
        return len(self.offsets) if is_over and not self.has_stopped else bisect_left(self.offsets, self.length)

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """The text that has become certain; with is_last all that there is."""
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
        """The text without its lead; what may be the beginning of one is held back."""
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
        found = min((at for at in (text.find(stop) for stop in self._stops) if at >= 0), default=-1)
        if found >= 0:
            self.has_stopped, self._held = True, ""
            return text[:found]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def pieces(text, tokens: Iterable[int]) -> Iterator[str]:  # noqa: ANN001 - AnswerText or one that reads it
    """What `text` gives out of a stream of token ids, piece by piece."""
    for token in tokens:
        if piece := text.push([token]):
            yield piece
    if piece := text.push([], is_last=True):
        yield piece
