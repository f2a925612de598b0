"""The least number of tokens of a text is never more than there are, whatever the tokenizer drops or joins."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_rlhf.data.chat import CHATML, LeastTokens, Rendered, compose_prompt, encode_all
from tests.factories.tiny import TEXTS, chatml_tokenizer

LONG = ["=" * 16, "internationalisation ", "\u00e9\u00e9\u00e9\u00e9", "\u4e00\u4e01"] * 20


def _of(model, trainer, texts: list[str], normalizer=None, **settings):
    backend = Tokenizer(model)
    backend.normalizer = normalizer
    for name, value in settings.items():
        setattr(backend, name, value)
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    backend.train_from_iterator(texts, trainer(special_tokens=[*special, "<unk>"], show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>",
                                   clean_up_tokenization_spaces=False)
    made.chat_template = CHATML
    return made


def _bytes(normalizer=None):
    def trainer(**given):
        return trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **given)

    return _of(models.BPE(), trainer, [*TEXTS, *LONG], normalizer,
               pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel())


def _pieces():
    """As of SentencePiece: a sign for spaces, many of which are one, and bytes for unknown characters."""
    def trainer(**given):
        return trainers.BpeTrainer(vocab_size=600, **given | {
            "special_tokens": [*given["special_tokens"], *(f"<0x{i:02X}>" for i in range(256))]})

    squeeze = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "\u2581"),
                                    normalizers.Replace("\u2581\u2581", "\u2581")])
    return _of(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True), trainer, [*TEXTS, *LONG], squeeze,
               decoder=decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]))


def _words():
    """Whatever it does not know is one unknown token, however long."""
    def trainer(**given):
        return trainers.WordLevelTrainer(vocab_size=60, **given)

    return _of(models.WordLevel(unk_token="<unk>"), trainer, TEXTS, pre_tokenizer=pre_tokenizers.Whitespace())


MADE = {"bytes": _bytes, "composed": lambda: _bytes(normalizers.NFC()), "pieces": _pieces, "words": _words,
        "compatible": lambda: _bytes(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(),
                                                           normalizers.StripAccents()])), "tiny": chatml_tokenizer}


@cache
def _tokenizer(name: str):
    tokenizer = MADE[name]()
    return tokenizer, LeastTokens(tokenizer)


@pytest.mark.parametrize("name", MADE)
@given(text=st.text() | st.text(st.sampled_from("=\u00e9\u0301\u4e00 \t<|im_end|>s\U0001d400\u1100\u1161\u11a8\ufdd0")))
@example(text="=" * 4000)
@example(text=" " * 4000 + "x")
@example(text="\U0001d400" * 500)  # a letter of four bytes, of which NFKC makes one
@example(text="\u1100\u1161\u11a8" * 300)  # three signs of Hangul that NFC makes one
@example(text="a" + "\u0301" * 3000)
@example(text="<|im_end|><s>" * 300)
@settings(max_examples=60, deadline=None)
def test_there_are_never_fewer_tokens(name, text):
    tokenizer, least = _tokenizer(name)
    for rendered in (compose_prompt(tokenizer, [{"role": "user", "content": text}]), Rendered(text, [], True)):
        assert least.of(rendered) <= len(encode_all(tokenizer, [rendered], append_eos=False)[0].ids)


@pytest.mark.parametrize("name", ["bytes", "composed", "pieces", "compatible", "tiny"])
def test_what_is_far_too_long_shows(name):
    """No token of these vocabularies has more than 100 bytes without white space; each marker is cut in two."""
    tokenizer, least = _tokenizer(name)
    text = compose_prompt(tokenizer, [{"role": "user", "content": "internationalisation " * 5000}])
    assert least.of(text) >= 100_000 / 100
    text = compose_prompt(tokenizer, [{"role": "user", "content": "<|im_end|>" * 5000}])
    assert least.of(text) > 5000


def test_a_tokenizer_that_makes_one_token_of_anything_has_no_bound():
    tokenizer, least = _tokenizer("words")
    assert len(tokenizer("x" * 9000)["input_ids"]) == 1
    assert least.of(compose_prompt(tokenizer, [{"role": "user", "content": "x" * 9000}])) == 0
