"""Whose log-probabilities are the old ones: the sampler's while they agree with training, and a forward's when not."""

import logging
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.roles import Actor, PolicyModule, Roles
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.rollout.collect import collect
from hybrid_rlhf.rollout.old_logprobs import OldLogprobs
from hybrid_rlhf.trainers.ppo import PPOConfig
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer

IDS = [[5 + i, 6 + 2 * i, 7] for i in range(12)]


class Length:
    name = "length"

    def score(self, rollout):
        return rollout.action_mask.sum(1).float()


def _collected(gate, temperature=1.0, measured_at=None, metrics=None):
    model = tiny_causal_lm()
    actor = Actor(HybridEngine(PolicyModule(model), model, eos_ids=[3], pad_id=0), tiny_tokenizer())
    if measured_at:  # a training forward that disagrees with the sampler
        generate = actor.generate
        actor.generate = lambda *given: replace(generate(*given), temperature=measured_at)
    roles = Roles(actor)
    prompts = Prompts(IDS, [""] * len(IDS))
    return collect(prompts, roles, Length(), SamplingConfig(max_new_tokens=10, temperature=temperature), 3,
                   Metrics() if metrics is None else metrics, gate)


def test_the_sampler_s_logprobs_are_the_training_forward_s_in_fp32_and_are_taken():
    metrics = Metrics()
    rollout = _collected(OldLogprobs("auto", max_drift=1e-5), temperature=0.7, metrics=metrics)
    recomputed = _collected(None, temperature=0.7)
    assert torch.equal(rollout.logprobs, rollout.sampled_logprobs)
    assert torch.allclose(rollout.logprobs, recomputed.logprobs, atol=1e-5)
    values = metrics.compute()
    assert 0 <= values["engine/logprob_drift"] < 1e-5
    assert values["engine/tokens_per_second"] > 0
    # 2 layers, keys and values, 2 heads of 8, fp32; 12 slots of 13 columns
    assert values["engine/kv_bytes"] == 2 * 2 * 2 * 8 * 4 * 12 * 13


def test_too_large_a_drift_closes_the_gate_aloud_and_once(caplog):
    gate, metrics = OldLogprobs("auto", max_drift=0.01), Metrics()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the policy is measured at another temperature than it was sampled at: a planted fault
            rollout = _collected(gate, temperature=0.5, measured_at=1.0, metrics=metrics)
    assert not torch.allclose(rollout.logprobs, rollout.sampled_logprobs, atol=0.01)
    assert metrics.compute()["engine/logprob_drift"] > 0.01
    assert caplog.text.count("recomputed by a training forward") == 1
    with caplog.at_level(logging.WARNING):
        _collected(gate)
    assert caplog.text.count("now the sampler's") == 1


def test_sampler_and_recompute_decide_once_and_measure_all_the_same():
    for mode in ("sampler", "recompute"):
        metrics = Metrics()
        rollout = _collected(OldLogprobs(mode), temperature=0.5, measured_at=1.0, metrics=metrics)
        same = torch.equal(rollout.logprobs, rollout.sampled_logprobs)
        assert same == (mode == "sampler")
        assert metrics.compute()["engine/logprob_drift"] > 0.01


def test_an_unknown_mode_is_the_user_s_error():
    with pytest.raises(UserError, match=r"ppo.old_logprobs is 'sample'.*did you mean sampler"):
        PPOConfig(old_logprobs="sample")
