"""Models that do not run over slots are sampled through transformers' generate by the same rules: limits, names,
streams, penalties and log-probabilities are the scheduler's; what does not agree with the plain forward is refused."""

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from tests.factories.architectures import random_model, roformer
from tests.factories.decoding import plain_logprobs

PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(n)] for i, n in enumerate((7, 1, 9, 7, 5, 1))]
SETTINGS = SamplingConfig(max_new_tokens=10, temperature=0.8)
KINDS = {"roformer": {}, "recurrent_gemma": dict(  # rotations of its own; a stale state in the modules
    block_types=["recurrent", "attention"], attention_window_size=4, num_key_value_heads=1, lru_width=32)}


def _engine(kind="roformer", **settings):
    model = roformer() if kind == "roformer" else random_model(kind, KINDS.get(kind, {}))
    return HybridEngine(model, model, eos_ids=[2], **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_of_ragged_prompts_are_those_of_each_prompt_alone(kind):
    engine = _engine(kind, max_batch=2)
    with engine.inference():
        drawn = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=10, temperature=0, repetition_penalty=1.3))
    assert engine.describe()["path"] == "generate"
    for prompt, tokens in zip(PROMPTS, drawn.tokens, strict=True):
        out = engine.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=10, repetition_penalty=1.3,
                                    eos_token_id=2, pad_token_id=0, use_cache=engine._runner.keeps_cache)
        assert tokens == out[0, len(prompt):].tolist()
    assert len({tuple(t) for t in drawn.tokens}) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_keeps_its_draws_its_limit_and_its_logprobs_whoever_shares_the_batch(kind):
    engine = _engine(kind, max_batch=3)
    requests, limits = PROMPTS * 3, [1 + i % 10 for i in range(18)]
    with engine.inference():
        whole = engine.generate(requests, SETTINGS, seed=7)
        limited = engine.generate(requests, SETTINGS, seed=7, limits=limits)
        for i in (0, 7, 16):
            assert engine.generate([requests[i]], SETTINGS, seed=7, numbers=[i]).tokens == [whole.tokens[i]]
    assert limited.tokens == [tokens[:n] for tokens, n in zip(whole.tokens, limits, strict=True)]
    assert set(limited.finish_reasons) == {"eos", "length"}
    assert whole.tokens[0] != whole.tokens[6]  # the same prompt under another name
    for prompt, tokens, logprobs in zip(requests, whole.tokens, whole.logprobs, strict=True):
        truth = plain_logprobs(engine.model, prompt, tokens, 0.8)
        assert torch.allclose(torch.tensor(logprobs).double(), truth, atol=1e-5, rtol=0)


def test_min_new_tokens_and_stop_tokens_hold():
    engine = _engine()
    with engine.inference():
        free = engine.generate(PROMPTS * 20, SETTINGS, seed=4)
        held = engine.generate(PROMPTS * 20, SamplingConfig(max_new_tokens=10, min_new_tokens=6), seed=4)
        stop = free.tokens[0][1]
        stopped = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=10, temperature=0.8, stop_token_ids=[stop]),
                                  seed=4)
    assert min(map(len, free.tokens)) < 6 <= min(map(len, held.tokens))
    assert stopped.tokens[0] == free.tokens[0][: free.tokens[0].index(stop) + 1]


def test_the_model_s_own_generation_config_does_not_bend_the_policy():
    engine = _engine()
    engine.model.generation_config.update(top_k=1, temperature=0.01, do_sample=True, suppress_tokens=list(range(5, 90)))
    with engine.inference():
        drawn = engine.generate([PROMPTS[0]] * 64, SamplingConfig(max_new_tokens=1, temperature=3.0), seed=3).tokens
    assert len({row[0] for row in drawn}) > 20
    assert engine.model.generation_config.top_k == 1


def test_a_stream_computes_one_token_at_a_time_and_can_be_dropped():
    engine = _engine()
    forwards = []
    with engine.inference():
        whole = engine.generate([PROMPTS[0]], SETTINGS, seed=5).tokens[0]
        engine.model.register_forward_hook(lambda *_: forwards.append(1))
        stream = engine.stream(PROMPTS[0], SETTINGS, seed=5)
        assert [next(stream), next(stream)] == whole[:2]
        assert len(forwards) == 2
        stream.close()
        assert len(forwards) == 2
        assert list(engine.stream(PROMPTS[0], SETTINGS, seed=5)) == [t for t in whole if t != 2]
        late = engine.stream(PROMPTS[0], SETTINGS, seed=5)
        next(late)
    with pytest.raises(RuntimeError, match="the mode has ended"):
        next(late)


def test_generate_s_cache_is_measured_and_kept_within_bounds():
    engine = _engine()
    with engine.inference():
        # 2 layers, keys and values, 4 heads of 8, fp32: 512 bytes a column; the last token is never stored
        engine.generate([PROMPTS[0]] * 8, SamplingConfig(max_new_tokens=10, min_new_tokens=10))
        assert engine.describe()["kv_bytes"] == 8 * 512 * 16
        engine.max_kv_bytes = 512 * 17 * 3
        engine.generate([PROMPTS[0]] * 8, SamplingConfig(max_new_tokens=10, min_new_tokens=10))
        assert engine.describe()["slots"] == 3 and engine.describe()["kv_bytes"] == 3 * 512 * 16
        engine.max_kv_bytes = 512 * 10
        for draw in (engine.generate, lambda prompts, settings: list(engine.stream(prompts[0], settings))):
            with pytest.raises(UserError, match="cache of one request of 17 tokens takes"):
                draw([PROMPTS[0]], SamplingConfig(max_new_tokens=10))
        assert len(engine.generate([PROMPTS[1]], SamplingConfig(max_new_tokens=9)).tokens) == 1


def test_logits_that_are_not_finite_are_an_error_in_a_batch_and_in_a_stream():
    engine = _engine()
    with engine.inference():
        expected = engine.generate(PROMPTS, SETTINGS).tokens
        weight = engine.model.get_output_embeddings().weight
        kept = weight[7].clone()
        weight[7] = float("nan")
        with pytest.raises(UserError, match="logits are not finite at position 1 of request 1"):
            engine.generate(PROMPTS, SETTINGS)
        with pytest.raises(UserError, match="logits are not finite at position 7"):
            list(engine.stream(PROMPTS[0], SETTINGS))
        weight[7] = kept
        assert engine.generate(PROMPTS, SETTINGS).tokens == expected


def test_a_model_whose_cache_is_wrong_is_read_anew_at_every_token_and_one_that_is_not_causal_is_refused(caplog):
    engine = _engine("rwkv")  # its decoding with a state mixes the rows of a batch
    with engine.inference():
        tokens = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=4, temperature=0)).tokens
    assert "generate" in engine.describe()["refused"]
    assert "without a cache" in caplog.text
    for prompt, row in zip(PROMPTS, tokens, strict=True):
        logits = engine.model(input_ids=torch.tensor([prompt + row]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == row
    sizes = dict(d_model=32, n_head=4, d_head=8, hidden_size=None, num_attention_heads=None, head_dim=None)
    model = random_model("xlnet", sizes)
    with pytest.raises(UserError, match="XLNetLMHeadModel cannot generate here: "), \
            HybridEngine(model, model).inference():
        pass


def test_a_roberta_s_pad_token_ends_a_response_and_is_refused_in_a_prompt():
    """Its own forward gives a pad token, sampled or not, no position; what followed would stand elsewhere."""
    engine = _engine("roberta")
    with engine.inference():
        drawn = engine.generate(PROMPTS * 16, SamplingConfig(max_new_tokens=20, temperature=2.0), seed=1)
        with pytest.raises(UserError, match="pad token 0, which has no position in RobertaForCausalLM"):
            engine.generate([[5, 0, 6]], SETTINGS)
    assert engine.describe()["path"] == "native"
    assert any(row[-1] == 0 for row in drawn.tokens) and not any(0 in row[:-1] for row in drawn.tokens)
