"""Whose log-probabilities are the old ones: the sampler's while they agree with training, and a forward's when not."""

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.roles import Actor, PolicyModule, Roles
from hybrid_rlhf.rollout import Prompts, Rollout, old_logprobs
from hybrid_rlhf.rollout.collect import collect
from hybrid_rlhf.rollout.old_logprobs import OldLogprobs
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


def test_too_large_a_drift_closes_the_gate_and_is_counted():
    gate, metrics = OldLogprobs("auto", max_drift=0.01), Metrics()
    for _ in range(2):  # the policy is measured at another temperature than it was sampled at: a planted fault
        rollout = _collected(gate, temperature=0.5, measured_at=1.0, metrics=metrics)
    assert not torch.allclose(rollout.logprobs, rollout.sampled_logprobs, atol=0.01)
    assert metrics.compute()["engine/logprob_drift"] > 0.01
    assert metrics.compute()["engine/logprobs_recomputed"] == 1.0
    metrics = Metrics()
    _collected(gate, metrics=metrics)
    assert "engine/logprobs_recomputed" not in metrics.compute()


class Forward:
    """An actor whose training forward is off by `gap` from the sampler. `asked`: the numbers of rows it was given."""

    def __init__(self, gap: float) -> None:
        self.gap, self.asked = gap, []

    def logprobs(self, rollout: Rollout) -> torch.Tensor:
        self.asked.append(rollout.prompts.ids)
        return rollout.sampled_logprobs + self.gap


def given(num_rows: int, gap: float = 0.25) -> tuple[Rollout, Forward]:
    """Row i has a response of i + 1 tokens, and 99 stands behind the shorter ones."""
    made = Rollout.from_responses(Prompts([[i] for i in range(num_rows)], [""] * num_rows),
                                  [[7] * (i + 1) for i in range(num_rows)], [True] * num_rows, 0, [""] * num_rows)
    made.sampled_logprobs = torch.full(made.action_mask.shape, -1.0).masked_fill(~made.action_mask, 99.0)
    return made, Forward(gap)


def test_the_drift_is_measured_on_every_eighth_row_and_the_mean_of_their_tokens():
    made, actor = given(10)
    metrics = Metrics()
    found = OldLogprobs(max_drift=0.25).logprobs(made, actor, metrics)  # at the border the sampler's are good enough
    assert found is made.sampled_logprobs and actor.asked == [[[0], [8]]]
    assert metrics.compute() == {"engine/logprob_drift": 0.25}
    assert metrics.add("engine/logprob_drift", 0.5, 10.0).compute()["engine/logprob_drift"] == 0.375  # 1 + 9 tokens
    each = OldLogprobs(num_skipped=3)
    assert each.logprobs(made, actor, Metrics())[9, 9] == -0.75 and actor.asked[1] == [[0], [3], [6], [9]]
    assert len(actor.asked[2]) == 10


@pytest.mark.parametrize("gap", [0.26, -0.26, float("nan")])
def test_a_drift_beyond_the_bound_or_that_is_no_number_has_all_rows_computed_again(gap):
    made, actor = given(3, gap)
    gate = OldLogprobs(max_drift=0.25)
    found = gate.logprobs(made, actor, Metrics())
    torch.testing.assert_close(found, made.sampled_logprobs + gap, equal_nan=True)
    assert actor.asked == [[[0]], [[0], [1], [2]]]
    actor.gap = 0.0
    assert gate.logprobs(made, actor, Metrics()) is made.sampled_logprobs  # each rollout is judged by itself


def test_recompute_measures_the_whole_rollout_and_sampler_never_computes_it():
    made, actor = given(3)
    metrics = Metrics()
    assert OldLogprobs("recompute").logprobs(made, actor, metrics)[2, 2] == -0.75
    assert metrics.add("engine/logprob_drift", 0.75, 6.0).compute()["engine/logprob_drift"] == 0.5  # 1 + 2 + 3 tokens
    assert OldLogprobs("sampler", max_drift=0.0).logprobs(made, actor, Metrics()) is made.sampled_logprobs
    assert [len(ids) for ids in actor.asked] == [3, 1]


def test_processes_decide_by_the_mean_over_the_tokens_of_all(monkeypatch):
    """Ours: 1 token at 0.25. The other: 3 tokens, 0.15 together: 0.1 over all."""
    seen = []

    def summed(own: torch.Tensor) -> torch.Tensor:
        seen.append(own.tolist())
        return own + torch.tensor([0.15, 3.0], dtype=torch.float64)

    monkeypatch.setattr(old_logprobs, "sum_over_ranks", summed)
    made, actor = given(1)
    assert OldLogprobs(max_drift=0.11).logprobs(made, actor, Metrics()) is made.sampled_logprobs
    assert seen == [[0.25, 1.0]]
    assert OldLogprobs(max_drift=0.09).logprobs(made, actor, Metrics()) is not made.sampled_logprobs


def test_a_process_without_rows_has_no_drift():
    made, actor = given(0)
    metrics = Metrics()
    assert OldLogprobs(max_drift=0.0).logprobs(made, actor, metrics) is made.sampled_logprobs
    assert metrics.compute() == {}
