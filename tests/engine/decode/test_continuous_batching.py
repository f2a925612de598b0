"""Continuous batching: who shares the batch changes nothing, limits are each request's own, and errors leave the engine
usable."""

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.runner import Runner
from tests.factories.architectures import build
from tests.factories.decoding import MANY_PROMPTS, SETTINGS


def _engine(model=None, **settings):
    model = build("llama") if model is None else model
    return HybridEngine(model, model, eos_ids=[2], **settings)


def test_the_samples_of_a_group_differ_and_cost_one_prefill(monkeypatch):
    prefilled = []
    true_prefill = Runner.prefill

    def count(self, cache, prompts, *rest, **named):
        prefilled.extend(map(tuple, prompts))
        return true_prefill(self, cache, prompts, *rest, **named)

    engine = _engine(max_batch=4)
    groups = [p for p in MANY_PROMPTS[1:4] for _ in range(6)]  # a group larger than the slots
    with engine.inference():
        monkeypatch.setattr(Runner, "prefill", count)
        drawn = engine.generate(groups, SETTINGS, seed=0)
    assert len({tuple(t) for t in drawn.tokens}) > 9
    assert len(prefilled) <= 4  # three prompts, and at most one whose last holder had been overwritten
    alone = _engine()
    with alone.inference():
        for i in (0, 7, 17):
            assert alone.generate([groups[i]], SETTINGS, seed=0, numbers=[i]).tokens == [drawn.tokens[i]]


def test_every_request_keeps_its_own_limit_and_says_why_it_ended():
    engine = _engine(max_batch=4)
    limits = [1 + i % 12 for i in range(64)]
    with engine.inference():
        drawn = engine.generate(MANY_PROMPTS, SETTINGS, seed=2, limits=limits)
        unlimited = engine.generate(MANY_PROMPTS, SETTINGS, seed=2)
    for tokens, whole, limit, reason in zip(drawn.tokens, unlimited.tokens, limits, drawn.finish_reasons, strict=True):
        assert tokens == whole[:limit]
        assert reason == ("eos" if tokens[-1] == 2 else "length")
    assert set(drawn.finish_reasons) == {"eos", "length"}


def test_stop_tokens_end_a_response_and_min_new_tokens_holds_them_back():
    engine = _engine()
    with engine.inference():
        free = engine.generate(MANY_PROMPTS, SETTINGS, seed=4)
        stop = max(range(5, 97), key=lambda t: sum(t in row for row in free.tokens))
        stopped = engine.generate(MANY_PROMPTS, SamplingConfig(max_new_tokens=12, stop_token_ids=[stop]), seed=4)
        held = engine.generate(MANY_PROMPTS, SamplingConfig(max_new_tokens=12, min_new_tokens=6), seed=4)
    for row, whole in zip(stopped.tokens, free.tokens, strict=True):
        assert row == whole[: whole.index(stop) + 1] if stop in whole else row == whole
    assert min(map(len, free.tokens)) < 6 <= min(map(len, held.tokens))


def test_repetition_penalty_equals_transformers():
    model = build("llama")
    engine = _engine(model)
    with engine.inference():
        ours = engine.generate(MANY_PROMPTS[1:6],
                               SamplingConfig(max_new_tokens=12, temperature=0, repetition_penalty=1.5))
    for prompt, tokens in zip(MANY_PROMPTS[1:6], ours.tokens, strict=True):
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, repetition_penalty=1.5,
                             eos_token_id=2, pad_token_id=0)
        assert tokens == out[0, len(prompt):].tolist()


def test_a_chat_s_next_turn_reads_the_cache_and_says_what_a_fresh_engine_says(monkeypatch):
    engine, fresh = _engine(), _engine()
    settings, computed = SamplingConfig(max_new_tokens=6, temperature=0), []
    true_prefill = Runner.prefill

    def count(self, cache, prompts, *rest, **named):
        computed.append(len(prompts[0]))
        return true_prefill(self, cache, prompts, *rest, **named)

    history = list(MANY_PROMPTS[2])
    with engine.inference(), fresh.inference():
        monkeypatch.setattr(Runner, "prefill", count)
        for turn in ([], [9, 8, 7], [11, 12, 13, 14]):
            history += turn
            computed.clear()
            answer = list(engine.stream(history, settings))
            assert computed == ([len(history) - 1] if not turn else [len(turn)])  # with the answer's last token
            expected = fresh.generate([history], settings).tokens[0]
            assert answer == [t for t in expected if t != 2]
            history += expected


def test_a_stream_that_outlives_the_mode_is_an_error():
    engine = _engine()
    with engine.inference():
        stream = engine.stream(MANY_PROMPTS[2], SETTINGS)
        next(stream)
    with pytest.raises(RuntimeError, match="the mode has ended"):
        next(stream)


def test_a_cache_that_cannot_hold_one_request_is_refused_and_a_small_one_has_fewer_slots():
    engine = _engine()
    with engine.inference():
        # 2 layers, keys and values, 2 heads of 8, fp32: 256 bytes a column
        engine.max_kv_bytes = 256 * 30 * 3
        engine.generate([MANY_PROMPTS[0]] * 8, SamplingConfig(max_new_tokens=29))
        assert engine.describe()["slots"] == 3
        assert engine.describe()["kv_bytes"] == 256 * 30 * 3
        engine.max_kv_bytes = 256 * 20
        with pytest.raises(UserError, match="cache of one request of 40 tokens takes"):
            engine.generate([MANY_PROMPTS[0]], SamplingConfig(max_new_tokens=39))
        assert len(engine.generate([MANY_PROMPTS[0]], SETTINGS).tokens) == 1


def test_a_chat_s_cache_is_measured_too_and_leaves_the_rest_to_the_batches():
    engine, settings = _engine(), SamplingConfig(max_new_tokens=9)
    with engine.inference():
        engine.max_kv_bytes = 256 * 20
        with pytest.raises(UserError, match="cache of one request of 21 tokens takes"):
            next(engine.stream(MANY_PROMPTS[4] + MANY_PROMPTS[0], replace(settings, max_new_tokens=10)))
        engine.max_kv_bytes = 256 * 40  # less than the room that a chat would like to have
    with engine.inference():
        assert len(list(engine.stream(MANY_PROMPTS[4], settings))) <= 9
        assert engine._conversation.cache.num_bytes() == 256 * 40
        with pytest.raises(UserError, match="cache of one request of 10 tokens takes"):
            engine.generate([MANY_PROMPTS[0]], settings)
        assert len(list(engine.stream(MANY_PROMPTS[4], settings))) <= 9


def test_logits_that_are_not_finite_are_an_error_and_the_engine_survives_it():
    model = build("llama")
    engine = _engine(model)
    with engine.inference():
        expected = engine.generate(MANY_PROMPTS, SETTINGS).tokens
        weight = model.lm_head.weight
        kept = weight[7].clone()
        weight[7] = float("nan")
        with pytest.raises(UserError, match="logits are not finite at position"):
            engine.generate(MANY_PROMPTS, SETTINGS)
        weight[7] = kept
        assert engine.generate(MANY_PROMPTS, SETTINGS).tokens == expected


def test_models_that_are_no_causal_language_models_are_refused():
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, T5Config

    from tests.factories.tiny import tiny_config

    sizes = dict(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    t5 = AutoModelForSeq2SeqLM.from_config(T5Config(**sizes))
    scorer = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    for model, said in ((t5, "encoder-decoder"), (scorer, "no language model head")):
        with pytest.raises(UserError, match=said), HybridEngine(model, model).inference():
            pass
