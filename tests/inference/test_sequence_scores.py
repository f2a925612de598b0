"""Scores of given tokens: transformers' log-softmax; single tokens as text and bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine.hybrid import HybridEngine
from hybrid_rlhf.inference.sequence_scores import SequenceScorer, TokenText
from tests.factories.architectures import build
from tests.factories.tiny import tiny_tokenizer

MODELS = {kind: build(kind) for kind in ("llama", "mamba")}
IDS = st.lists(st.integers(5, 8), min_size=2, max_size=9)  # few tokens, so that beginnings are shared


@torch.no_grad()
def _truth(model, ids: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double(), -1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=40, deadline=None)
@given(asked=st.lists(st.tuples(IDS, st.integers(1, 9), st.integers(0, 4), st.booleans()), min_size=1, max_size=6))
def test_scores_are_those_of_transformers_whatever_was_asked_before(kind, asked):
    model = MODELS[kind]
    engine = HybridEngine(model, model, eos_ids=[2])
    with engine.inference():
        scorer = SequenceScorer(engine, 16)
        found = [scorer.score(ids, min(first, len(ids)), top, with_next) for ids, first, top, with_next in asked]
    for (ids, first, num_top, with_next), scored in zip(asked, found, strict=True):
        first, truth = min(first, len(ids)), _truth(model, ids)
        assert [each.token for each in scored] == ids[first:] + [int(truth[-1].argmax())] * with_next
        for place, each in enumerate(scored, first - 1):
            assert each.logprob == pytest.approx(float(truth[place, each.token]), abs=1e-3)
            want = truth[place].sort(descending=True).values[:num_top].tolist()
            assert [logprob for _, logprob in each.top] == pytest.approx(want, abs=1e-3)
            assert [float(truth[place, token]) for token, _ in each.top] == pytest.approx(want, abs=1e-3)


def test_two_answers_to_a_question_cost_it_once(monkeypatch):
    model = MODELS["llama"]
    engine, question = HybridEngine(model, model, eos_ids=[2]), list(range(5, 35))
    with engine.inference():
        scorer, widths = SequenceScorer(engine, 64), []
        hook = model.base_model.register_forward_pre_hook(
            lambda _module, _given, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True)
        for answer in ([40, 41], [42, 43], [42, 43]):
            assert len(scorer.score([*question, *answer], 1, 2)) == 31
        hook.remove()
    assert widths == [31, 2, 1]  # the last column of what they share predicts where they part


def test_broken_weights_are_said():
    model = build("llama", seed=3)
    engine = HybridEngine(model, model, eos_ids=[2])
    with engine.inference():
        scorer = SequenceScorer(engine, 16)
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        with pytest.raises(UserError, match="not finite"):
            scorer.score([5, 6, 7], 1)


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
