"""inference() is the only switch: it changes no weight, restores every mode, and sampling does what it was told."""

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def _engine(**changes):
    return HybridEngine.for_inference(tiny_causal_lm(**changes), tiny_tokenizer())


def test_greedy_tokens_equal_transformers_generate_one_prompt_at_a_time():
    engine = _engine()
    with engine.inference():
        ours = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=12, temperature=0))
    for prompt, tokens, reason in zip(PROMPTS, ours.tokens, ours.finish_reasons, strict=True):
        oracle = engine.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt):]
        assert tokens == oracle.tolist()[: len(tokens)]
        assert reason == ("eos" if tokens[-1] == 3 else "length")


def test_an_exception_inside_restores_every_mode_and_weight():
    engine = _engine()
    engine.module.train()
    engine.model.model.layers[1].eval()
    engine.model.gradient_checkpointing_enable()
    before = {n: p.clone() for n, p in engine.model.state_dict().items()}
    modes = [m.training for m in engine.module.modules()]
    with pytest.raises(ZeroDivisionError), engine.inference():  # noqa: PT012 - the block is what is tested
        assert not engine.module.training and not torch.is_grad_enabled()
        assert not any(getattr(m, "gradient_checkpointing", False) for m in engine.module.modules())
        raise ZeroDivisionError
    assert [m.training for m in engine.module.modules()] == modes
    assert any(getattr(m, "gradient_checkpointing", False) for m in engine.module.modules())
    assert torch.is_grad_enabled() and not engine.is_inference
    assert all(torch.equal(p, before[n]) for n, p in engine.model.state_dict().items())


def test_the_modes_do_not_nest_and_do_not_mix():
    engine = _engine()
    with pytest.raises(RuntimeError, match="outside"):
        engine.generate(PROMPTS, SamplingConfig())
    with engine.inference():
        with pytest.raises(RuntimeError, match="already"), engine.inference():
            pass
        with pytest.raises(RuntimeError, match="training forward"):
            engine(torch.tensor([[1]]))


def test_the_same_seed_draws_the_same_and_leaves_torch_s_own_generator_alone():
    engine, settings = _engine(), SamplingConfig(max_new_tokens=8)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    with engine.inference():
        one, two, other = (engine.generate(PROMPTS, settings, seed).tokens for seed in (1, 1, 2))
    assert one == two != other
    assert torch.equal(torch.rand(1), expected)


def test_the_model_s_own_generation_config_does_not_bend_the_policy():
    """top_k 1 in a model's generation_config would make every draw greedy, without a word."""
    engine = _engine()
    engine.model.generation_config.update(top_k=1, temperature=0.01, do_sample=True)
    with engine.inference():
        drawn = engine.generate([[5, 6]] * 64, SamplingConfig(max_new_tokens=1), seed=3).tokens
    assert len({row[0] for row in drawn}) > 20


def _chi_square(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Pearson's statistic over cells expecting at least 5, the rest pooled, and its degrees of freedom."""
    big = expected >= 5
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]])
    keep = wanted > 0
    return float(((observed - wanted)[keep] ** 2 / wanted[keep]).sum()), int(keep.sum()) - 1


@pytest.mark.parametrize("settings", [dict(temperature=0.5), dict(top_k=5), dict(top_p=0.6), dict(min_p=0.3)],
                         ids=lambda s: next(iter(s)))
def test_sampling_flags_reach_the_sampler(settings):
    """A chi-square test of one drawn token against probabilities computed here from the logits."""
    engine, num = _engine(), 4000
    engine.max_batch = num
    with torch.no_grad():
        engine.model.lm_head.weight.mul_(20)  # a tiny random model is nearly uniform; sharpen it
        logits = engine.model(torch.tensor([[5, 6]])).logits[0, -1] / settings.get("temperature", 1.0)
    probs = logits.softmax(0)
    ranked, order = probs.sort(descending=True)
    if "top_k" in settings:
        probs[order[5:]] = 0
    if "top_p" in settings:
        probs[order[ranked.cumsum(0) - ranked >= 0.6]] = 0
    if "min_p" in settings:
        probs[probs < 0.3 * ranked[0]] = 0
    with engine.inference():
        drawn = engine.generate([[5, 6]] * num, SamplingConfig(max_new_tokens=1, **settings), seed=0).tokens
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=len(probs)).double()
    expected = (probs / probs.sum()).double() * num
    assert counts[expected == 0].sum() == 0
    statistic, freedom = _chi_square(counts, expected)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4  # about 4 standard deviations of the chi-square law


def test_a_stream_yields_what_generate_returns_without_the_stop_token_and_can_be_dropped():
    engine, settings = _engine(), SamplingConfig(max_new_tokens=20)
    with engine.inference():
        whole = engine.generate([PROMPTS[0]], settings, seed=5)
        streamed = list(engine.stream(PROMPTS[0], settings, seed=5))
        expected = whole.tokens[0][:-1] if whole.finish_reasons == ["eos"] else whole.tokens[0]
        assert streamed == expected
        stream = engine.stream(PROMPTS[0], settings, seed=5)
        assert next(stream) == expected[0]
        stream.close()
        assert list(engine.stream(PROMPTS[0], settings, seed=5)) == expected


def test_a_prompt_without_room_for_the_response_is_refused_with_the_numbers():
    engine = _engine()
    with engine.inference():
        with pytest.raises(UserError, match="prompt of 250 tokens and max_new_tokens 10 exceed the model's 256"):
            engine.generate([[5] * 250], SamplingConfig(max_new_tokens=10))
        assert len(engine.generate([[5] * 246], SamplingConfig(max_new_tokens=10)).tokens[0]) <= 10
