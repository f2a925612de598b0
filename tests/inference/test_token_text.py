"""Single tokens as text and bytes, for byte-level and SentencePiece-like vocabularies."""

from __future__ import annotations

import pytest

from hybrid_rlhf.inference.sequence_scores import TokenText
from tests.factories.tiny import tiny_tokenizer


@pytest.mark.parametrize("text", [
    "Once upon a time", "h\u00e9llo \u4e16\u754c \U0001f98a!\n\t", "<|im_end|> x\u00a0\u2028"])
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(text):
    tokenizer = tiny_tokenizer()
    texts = TokenText(tokenizer)
    found = [texts.of(token) for token in tokenizer(text)["input_ids"]]
    assert b"".join(bytes(data) for _, data in found) == text.encode()
    for shown, data in found:
        if not shown.startswith("bytes:"):
            assert shown.encode() == bytes(data)


def test_a_part_of_a_character_and_a_row_without_a_token_are_named():
    tokenizer = tiny_tokenizer()
    texts, ids = TokenText(tokenizer), tokenizer("\u4e16")["input_ids"]
    assert [texts.of(token) for token in ids] == [
        ("bytes:\\xe4", [0xE4]), ("bytes:\\xb8", [0xB8]), ("bytes:\\x96", [0x96])]
    assert texts.of(10_000) == ("token_id:10000", None)


def test_sentencepiece_marks_are_spaces_and_its_byte_tokens_bytes():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"\u2581a": 0, "b": 1, "<0xE4>": 2, "<s>": 3}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenText(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"))
    assert [texts.of(i) for i in range(4)] == [
        (" a", [32, 97]), ("b", [98]), ("bytes:\\xe4", [0xE4]), ("<s>", [60, 115, 62])]
