"""Text of tokens that come one after the other."""

from __future__ import annotations

from collections.abc import Sequence

REPLACEMENT = "\ufffd"  # decoders write it for bytes of an incomplete or invalid character
_MOST_HELD = 64  # tokens held for the end of a character, which has at most four bytes
_CONTEXT = 8  # tokens before a text that are decoded with its first one


class IncrementalDetokenizer:
    """Text of a growing list of tokens, in pieces that never split a character.

    A character of several bytes can be several tokens, and some tokenizers drop the space before the first token they
    decode. So the new text is the difference between decoding the last pieces with and without the new tokens. It is
    held back while it ends in an incomplete character, up to a few tokens: invalid bytes would be decoded again with
    every token. Special tokens are text too: a caller leaves out those that end a response. before: the tokens before
    this text, which are not part of it.
    """

    def __init__(self, tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = list(before[-_CONTEXT:])
        self._start, self._done = 0, len(self._ids)  # decode from _start; the text before _done was returned
        if REPLACEMENT in self._decode(self._done):  # a split character: decode without this context
            self._ids, self._done = [], 0

    def push(self, token: int) -> str:
        """The text that `token` completes; often empty."""
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
        """The rest at the end, incomplete characters as U+FFFD."""
        piece = self._decode(len(self._ids))[len(self._decode(self._done)):]
        self._start = self._done = len(self._ids)
        return piece

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start:end], skip_special_tokens=False,
                                      clean_up_tokenization_spaces=False)
