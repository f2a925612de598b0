"""What a role asks of its engine and keeps of it, on engines that only write down what they are asked."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.engine.decode.sampling import Generation
from hybrid_rlhf.roles import Actor, Critic, Reference, Roles
from hybrid_rlhf.roles import actor as actor_module
from hybrid_rlhf.rollout import Prompts

T = torch.tensor


class Noted:
    """An engine with an optimizer, or without. It tells what was asked of it in `told`."""

    def __init__(self, shard: str | None = None, num_steps: int = 0) -> None:
        self.told, self.depth, self.name, self.oom_limits, self.pad_id = [], 0, "", {}, 0
        self.module = SimpleNamespace(mean=0.0, std=1.0)
        self.training = None if shard is None else SimpleNamespace(
            shard=lambda: shard, load_shard=lambda state: self.told.append((state, self.depth)), num_steps=num_steps,
            num_omitted=0, schedule=lambda step: step / 8)

    def readable(self, state: str) -> str:
        return f"{state} on the host"

    @contextmanager
    def active(self):
        self.depth += 1
        yield
        self.depth -= 1


def roles(is_new: bool = True) -> Roles:
    return Roles(Actor(Noted("a"), None), Reference(Noted()), Critic(Noted("c"), is_new=is_new))


def test_a_checkpoint_holds_what_is_trained_the_limits_of_all_and_the_scale_of_a_new_critic():
    made = roles()
    made.actor.engine.oom_limits, made.ref.engine.oom_limits = {"update": 5, "slots": 2}, {"score": 7}
    made.critic.set_scale(3.0, 0.5)
    state = made.state()
    assert state == {"actor": "a on the host", "critic": "c on the host", "value_scale": [3.0, 0.5],
                     "oom_limits": {"actor": {"update": 5, "slots": 2}, "ref": {"score": 7}, "critic": {}}}
    made.actor.engine.oom_limits["update"] = 1
    assert state["oom_limits"]["actor"]["update"] == 5  # as it was when it was asked for
    assert "value_scale" not in roles(is_new=False).state()
    assert Roles(Actor(Noted(), None)).state() == {"oom_limits": {"actor": {}}}


def test_a_run_goes_on_with_shards_limits_and_scale_each_in_its_role_s_turn():
    state = {"actor": "A", "critic": "C", "value_scale": [3.0, 0.5], "num_steps": 9,
             "oom_limits": {"actor": {"update": 5}, "ref": {"score": 7}, "critic": {}}}
    made = roles()
    made.load_state(state)
    assert (made.actor.engine.told, made.critic.engine.told, made.ref.engine.told) == ([("A", 1)], [("C", 1)], [])
    assert made.oom_limits() == state["oom_limits"]
    assert (made.critic.mean, made.critic.std) == (3.0, 0.5)
    # a module's number is (raw - mean) / std, which is to be 3 + 0.5 raw = (raw + 6) / 2
    assert (made.critic.engine.module.mean, made.critic.engine.module.std) == (-6.0, 2.0)
    made.actor.engine.oom_limits["update"] = 1
    assert state["oom_limits"]["actor"] == {"update": 5}
    old = roles(is_new=False)
    old.load_state({"actor": "A", "critic": "C", "learnt": {"actor": {"update": 6}}})  # as earlier releases called it
    assert old.oom_limits() == {"actor": {"update": 6}, "ref": {}, "critic": {}} and old.critic.mean == 0.0


class Sampler(Noted):
    """An engine whose responses are given."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self.generation = generation

    def generate(self, prompts, sampling, seed, *, numbers, keep_candidates, images):
        self.told.append((prompts, sampling.temperature, seed, list(numbers), keep_candidates))
        return self.generation


def text_of(row, skip_special_tokens):
    assert not skip_special_tokens  # only what ends a response is cut
    return " ".join(map(str, row))


TEXTS = SimpleNamespace(decode=text_of, eos_token_id=3, pad_token_id=0)


@pytest.fixture
def second_process(monkeypatch):
    """Seven prompts are before ours, of twelve in all."""
    monkeypatch.setattr(actor_module, "place_over_ranks", lambda count: (7, 12))


def test_responses_are_numbered_over_all_processes_and_read_without_the_token_that_ended_them(second_process):
    kept = [[T([8, 9], dtype=torch.int32), T([3], dtype=torch.int32)],
            [T([5], dtype=torch.int32), T([6, 7], dtype=torch.int32)]]
    engine = Sampler(Generation([[8, 3], [5, 6]], ["eos", "length"], [[-0.5, -1.0], [-2.0, -0.25]], kept))
    actor = Actor(engine, TEXTS)
    prompts = Prompts([[1], [2]], ["one", "two"])
    made = actor.generate(prompts, SamplingConfig(temperature=0.7, top_p=0.9), 42, keep_candidates=True)
    assert engine.told == [([[1], [2]], 0.7, 42, [7, 8], True)]
    assert made.completions == ["8", "5 6"] and made.has_eos.tolist() == [True, False]
    assert made.response_ids.tolist() == [[8, 3], [5, 6]] and made.prompts is prompts
    assert made.sampled_logprobs.tolist() == [[-0.5, -1.0], [-2.0, -0.25]]
    assert made.temperature == 0.7 and made.kept.sizes[1].tolist() == [1, 2] and made.kept.ids[0].tolist() == [8, 9, 3]


def test_what_was_drawn_greedily_is_scored_as_it_is_and_shorter_rows_are_filled_up_with_zeros():
    engine = Sampler(Generation([[8, 4, 3], [3]], ["eos", "eos"], [[-0.5, -1.0, -0.25], [-0.125]]))
    engine.pad_id = 77
    actor = Actor(engine, TEXTS)
    made = actor.generate(Prompts([[1], [2]], ["", ""]), SamplingConfig(temperature=0.0), 0)
    assert made.temperature == 1.0 and made.kept is None and made.completions == ["8 4", ""]
    assert made.sampled_logprobs.dtype == torch.float32
    assert made.sampled_logprobs.tolist() == [[-0.5, -1.0, -0.25], [-0.125, 0.0, 0.0]]
    assert made.response_ids.tolist() == [[8, 4, 3], [3, 77, 77]]
    assert engine.told == [([[1], [2]], 0.0, 0, [0, 1], False)]
