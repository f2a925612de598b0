"""Single tokens as bytes and as text, for lists of tokens with their log-probabilities."""

from __future__ import annotations

import re

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # what SentencePiece writes for a space


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2's encoder.py): visible ones stand for
    themselves, the others for 256 and up in order."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


class TokenText:
    """The tokens of one tokenizer. Each is looked up once."""

    def __init__(self, tokenizer) -> None:  # noqa: ANN001 - a transformers class
        decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self._tokenizer, self._added = tokenizer, tokenizer.added_tokens_decoder
        self._is_byte_level, self._has_spaces = "ByteLevel" in decoder, _SPACE in decoder
        self._found: dict[int, tuple[str, list[int] | None]] = {}

    def of(self, token: int) -> tuple[str, list[int] | None]:
        """Its text and its bytes. Bytes that are no whole characters are written as bytes:\\xe4\\xb8; a row of the
        model that is no token as token_id:123, without bytes."""
        if token not in self._found:
            self._found[token] = self._of(token)
        return self._found[token]

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return f"token_id:{token}", None
        data = self._bytes(token, piece)
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data), list(data)

    def _bytes(self, token: int, piece: str) -> bytes:
        if token in self._added:
            return piece.encode(errors="replace")
        if self._is_byte_level and all(c in _ALPHABET for c in piece):
            return bytes(_ALPHABET[c] for c in piece)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if self._has_spaces:
            return piece.replace(_SPACE, " ").encode(errors="replace")
        return self._tokenizer.decode([token], clean_up_tokenization_spaces=False).encode(errors="replace")
