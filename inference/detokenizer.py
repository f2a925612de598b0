"""From token ids to text: whole characters only."""

from __future__ import annotations

from collections.abc import Iterator

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)


class IncrementalDetokenizer:
    """Text of a growing list of tokens, given out in pieces that never split a character.

    A character of several bytes can be several tokens, and some tokenizers drop the space before the first token they
    decode. So the new text is what decoding the last pieces together adds to decoding them without the new tokens, and
    is held back while it ends in a character that is not complete. keeps_special: special tokens are text too.
    """

    def __init__(self, tokenizer, keeps_special: bool = False) -> None:
        self._tokenizer, self._keeps_special = tokenizer, keeps_special
        self._ids: list[int] = []
        self._start, self._done = 0, 0  # decode from _start; what lies before _done was given out

    def push(self, token: int) -> str:
        """The text that has become certain with `token`; often empty."""
        self._ids.append(token)
        known, text = self._decode(self._done), self._decode(len(self._ids))
        if text.endswith(REPLACEMENT) or len(text) <= len(known):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(known):]

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        piece = self._decode(len(self._ids))[len(self._decode(self._done)):]
        self._start = self._done = len(self._ids)
        return piece

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._start:end], skip_special_tokens=not self._keeps_special,
                                      clean_up_tokenization_spaces=False)


def pieces(tokens: Iterator[int], tokenizer) -> Iterator[str]:
    """The text of a stream of token ids, piece by piece; together they are the text of the whole."""
    text = IncrementalDetokenizer(tokenizer)
    for token in tokens:
        if piece := text.push(token):
            yield piece
    if piece := text.flush():
        yield piece
