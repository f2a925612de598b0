"""From token ids to text: whole characters only."""

from __future__ import annotations

from collections.abc import Sequence

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
_MOST_HELD = 64  # tokens that wait for the end of a character; it has four bytes at most
_CONTEXT = 8  # tokens of what went before that are decoded with the first of a text


class IncrementalDetokenizer:
    """Text of a growing list of tokens, given out in pieces that never split a character.

    A character of several bytes can be several tokens, and some tokenizers drop the space before the first token they
    decode. So the new text is what decoding the last pieces together adds to decoding them without the new tokens, and
    is held back while it ends in a character that is not complete; but no more than a few tokens are, for what is no
    text at all would be decoded again with every token. Special tokens are text too: a caller leaves out those that
    end a response. before: the tokens that this text goes on from, which are no part of it.
    """

    def __init__(self, tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(before[-_CONTEXT:])
        self._start, self._done = 0, len(self._ids)  # decode from _start; what lies before _done was given out
        if REPLACEMENT in self._decode(self._done):  # a character cut in two, which must not take more with it
            self._ids, self._done = [], 0

    def push(self, token: int) -> str:
        """The text that has become certain with `token`; often empty."""
        self._ids.append(token)
        known, text = self._decode(self._done), self._decode(len(self._ids))
        has_none = len(text) <= len(known)
        if has_none or text.endswith(REPLACEMENT):
            if len(self._ids) - self._done < _MOST_HELD:
                return ""
            if has_none:
                del self._ids[self._done:]
                return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(known):]

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        piece = self._decode(len(self._ids))[len(self._decode(self._done)):]
        self._start = self._done = len(self._ids)
        return piece

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start:end], skip_special_tokens=False,
                                      clean_up_tokenization_spaces=False)
