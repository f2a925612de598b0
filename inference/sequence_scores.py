"""Log-probabilities of the tokens of a sequence with the top tokens at each position, and single tokens as text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybrid_rlhf.algorithms.divergence import top_k_logprobs
from hybrid_rlhf.algorithms.likelihood import chunk_rows, token_logprobs_and
from hybrid_rlhf.core.config import check
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.models.backbone import own_head


class ScoredToken(NamedTuple):
    """A token, its log-probability given those before it, and the top tokens at its position, (id, log-probability)
    each, likeliest first. In nats, of softmax(logits): without temperature, truncation and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SequenceScorer:
    """Scores sequences one after the other, in inference mode, each by one prefill and chunks of the vocabulary.

    The common prefix with the previous sequence is not computed again: several answers to one question compute the
    question once.
    """

    def __init__(self, engine: HybridEngine, capacity: int) -> None:
        self._model, self._reader = engine.model, engine.read(capacity)
        self._known: list[ScoredToken | None] = []  # scores of the tokens in the reader's cache

    @torch.no_grad()
    def score(self, ids: Sequence[int], first: int, num_top: int = 0, with_next: bool = False) -> list[ScoredToken]:
        """One for each of ids[first:], 1 <= first, with the num_top likeliest tokens at its position. with_next: also
        the likeliest token after `ids`. Raises UserError for logits that are not finite."""
        ids, num_held = list(ids), self._reader.num_held(ids)
        known = self._known[:num_held]
        start = next((i for i in range(first, len(known)) if not _has(known[i], num_top)), max(first, len(known)))
        known += [None] * (start - len(known))
        if start < len(ids) + with_next:
            self._known = []  # in case this fails
            known = known[:start] + self._scored(ids, min(start - 1, num_held), start, max(num_top, int(with_next)),
                                                 with_next)
            self._known = known[: len(ids)]
        return [each._replace(top=each.top[:num_top]) for each in known[first : len(ids) + with_next]]

    def _scored(self, ids: list[int], column: int, start: int, num_top: int, with_next: bool) -> list[ScoredToken]:
        """Scores of ids[start:]; `column`: the number of cached tokens to keep, at most start - 1."""
        states = self._reader.states(ids if with_next else ids[:-1], column)[start - 1 - column :]
        targets = torch.tensor([*ids[start:], *([0] if with_next else [])], device=states.device)
        size = chunk_rows(self._model.config.get_text_config().vocab_size, torch.float32)
        (logprobs, *_), likeliest = token_logprobs_and(lambda logits: top_k_logprobs(logits, num_top), (), states,
                                                       targets, own_head(self._model), chunk_size=size)
        check(not logprobs.isnan().any(), "the model's logits are not finite: its weights have broken; serve an "
                                          "earlier model")
        tops = [tuple(zip(*pair, strict=True)) for pair in zip(*(part.tolist() for part in likeliest), strict=True)]
        scored = [ScoredToken(token, dict(top).get(token, logprob), top)  # the same number as in the top tokens
                  for token, logprob, top in zip(targets.tolist(), logprobs.tolist(), tops, strict=True)]
        if with_next:
            (token, logprob), *_ = scored[-1].top
            scored[-1] = scored[-1]._replace(token=token, logprob=logprob)
        return scored


def _has(known: ScoredToken | None, num_top: int) -> bool:
    return known is not None and len(known.top) >= num_top


# -- single tokens as bytes and as text --------------------------------------------------------------------------------

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece's character for a space


def _byte_alphabet() -> dict[str, int]:
    """The characters of bytes in byte-level vocabularies (GPT-2's encoder.py): visible bytes are themselves, the others
    256 and up in order."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [b for b in range(256) if b not in visible]
    return {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


class TokenText:
    """Texts and bytes of a tokenizer's tokens, cached."""

    def __init__(self, tokenizer) -> None:  # noqa: ANN001 - a transformers class
        decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self._tokenizer, self._added = tokenizer, tokenizer.added_tokens_decoder
        self._is_byte_level, self._has_spaces = "ByteLevel" in decoder, _SPACE in decoder
        self._cached: dict[int, tuple[str, list[int] | None]] = {}

    def of(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text and bytes. Bytes that are not full characters are written as bytes:\\xe4\\xb8; a row of the
        model without a token as token_id:123, without bytes."""
        if token not in self._cached:
            self._cached[token] = self._of(token)
        return self._cached[token]

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
