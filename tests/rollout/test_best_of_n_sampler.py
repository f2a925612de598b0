"""Rounds of sampling for best-of-n methods: the seed of each, what they rank by, and what a checkpoint has of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rollout import Prompts, Rollout, best_of_n
from hybrid_rlhf.rollout.best_of_n import BestOfNSampler

SAMPLING, PROMPTS = SamplingConfig(num_samples=2), Prompts([[5]], ["five"])


def scored() -> Rollout:
    made = Rollout.from_responses(Prompts([[5], [5], [6]], ["five", "five", "six"]), [[3], [9], [9]],
                                  [True, False, False], 0, ["a", "b", "c"])
    made.scores = torch.tensor([1.0, 2.0, float("nan")])
    return made


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """What `collect` and `collect_held_out` were given."""
    seen = []
    monkeypatch.setattr(best_of_n, "collect", lambda *given, **named: seen.append((given, named)) or scored())
    monkeypatch.setattr(best_of_n, "collect_held_out", lambda *given, **named: seen.append((given, named)) or "found")
    return seen


def test_each_round_has_a_seed_of_its_own_and_a_response_without_an_end_ranks_lower(asked):
    sampler, metrics = BestOfNSampler("roles", "source", SAMPLING, 7, 0.5, keep_candidates=True), Metrics()
    for number in range(2):
        rollout, ranks = sampler.sample(PROMPTS, metrics)
        assert ranks[:2].tolist() == [1.0, 1.5] and ranks[2].isnan() and rollout is sampler.last_rollout
        given, named = asked[number]
        assert given == (PROMPTS, "roles", "source", SAMPLING, 7 * 1_000_003 + number, metrics, sampler.old_logprobs)
        assert named == {"keep_candidates": True}
    assert sampler.num_steps == 2 and sampler.samples(1) == sampler.samples()[:1]
    assert [each["completion"] for each in sampler.samples()] == ["a", "c"]


def test_nothing_is_subtracted_or_kept_and_nobody_shown_unless_asked_for(asked):
    sampler = BestOfNSampler("roles", "source", SAMPLING, 0)
    assert sampler.samples() == [] and sampler.num_steps == 0
    assert sampler.sample(PROMPTS, Metrics())[1][:2].tolist() == [1.0, 2.0] and asked[0][1]["keep_candidates"] is False


def test_four_responses_are_shown_where_nobody_says_how_many():
    sampler = BestOfNSampler("roles", "source", SAMPLING, 0)
    made = Rollout.from_responses(Prompts([[i] for i in range(6)], [""] * 6), [[3]] * 6, [True] * 6, 0, list("abcdef"))
    made.scores, sampler.last_rollout = torch.zeros(6), made
    assert [each["completion"] for each in sampler.samples()] == ["a", "b", "c", "d"]


def test_held_out_prompts_are_always_drawn_alike(asked):
    sampler = BestOfNSampler("roles", "source", SAMPLING, 7, keep_candidates=True)
    sampler.sample(PROMPTS, Metrics())
    assert sampler.evaluate([PROMPTS]) == "found"
    assert asked[1] == (([PROMPTS], "roles", "source", SAMPLING, 7), {"keep_candidates": True})


def test_a_run_goes_on_with_its_rounds_and_its_source():
    loaded = []
    roles = SimpleNamespace(state=lambda: {"actor": "shard"}, load_state=lambda state: loaded.append(state["actor"]))
    source = SimpleNamespace(state=lambda: "calls", load_state=loaded.append)
    first = BestOfNSampler(roles, source, SAMPLING, 0)
    first.num_steps = 3
    state = first.state()
    assert state == {"actor": "shard", "num_steps": 3, "source": "calls"}
    second = BestOfNSampler(roles, source, SAMPLING, 0)
    second.load_state(state)
    assert (second.num_steps, loaded) == (3, ["shard", "calls"])
    plain = BestOfNSampler(roles, SimpleNamespace(), SAMPLING, 0)
    assert "source" not in plain.state()
    plain.load_state(plain.state() | {"num_steps": 5.0})
    assert plain.num_steps == 5 and isinstance(plain.num_steps, int)
