"""What a role asks of its engine and keeps of it, on engines that only write down what they are asked."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.engine.decode.sampling import Generation
from hybrid_rlhf.roles import Actor, Critic, Reference, Reward, Roles, Teacher, role_state
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


def test_every_role_names_its_engine_for_messages():
    named = [(Actor, "actor"), (Critic, "critic"), (Reference, "reference"), (Reward, "reward model"),
             (Teacher, "teacher")]
    for kind, name in named:
        role = kind(Noted(), None) if kind is Actor else kind(Noted())
        assert role.engine.name == name and role.max_tokens == 8192


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


def test_limits_of_a_role_that_is_not_there_are_a_fault_and_so_is_training_without_an_optimizer():
    with pytest.raises(ValueError, match=r"^the teacher is None, and is needed here$"):
        roles(is_new=False).load_state({"actor": "A", "critic": "C", "oom_limits": {"teacher": {"score": 1}}})
    with pytest.raises(ValueError, match=r"^the optimizer of the reference is None, and is needed here$"):
        role_state.training_of(Reference(Noted()))


def test_the_schedule_counts_updates_that_were_planned_and_is_scaled_by_what_a_factor_says_now():
    role = Actor(Noted("a", num_steps=3), None)
    role_state.schedule_at(role, 8)
    assert role.engine.training.num_omitted == 5
    factors = [0.5, 0.25]
    role_state.scale_schedule(role, lambda: factors[0])
    assert role.engine.training.schedule(4) == 0.25  # 0.5 x 4 / 8
    del factors[0]
    assert role.engine.training.schedule(4) == 0.125


def test_a_new_critic_that_has_learned_keeps_its_scale():
    critic = Critic(Noted("c", num_steps=1), is_new=True)
    critic.begin(T([5.0, 7.0]))
    assert (critic.mean, critic.std) == (0.0, 1.0)
    fresh = Critic(Noted("c"), is_new=True)
    fresh.begin(T([5.0, 8.0]))
    assert (fresh.mean, fresh.std) == (6.5, 1.5)


class Sampler(Noted):
    """An engine whose responses are given."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self.generation = generation

    def generate(self, prompts, sampling, seed, *, numbers, keep_candidates):
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


def test_of_no_prompts_no_text_is_read():
    engine = Sampler(Generation([], [], []))
    actor = Actor(engine, TEXTS)
    assert actor.generate(Prompts([], []), SamplingConfig(), 0).completions == []


def test_episodes_are_played_by_who_plays_them(second_process):
    seen = []
    actor = Actor(Noted(), None, episodes=SimpleNamespace(play=lambda *given: seen.append(given) or "a rollout"))
    prompts, sampling = Prompts([[1], [2]], ["", ""]), SamplingConfig()
    assert actor.generate(prompts, sampling, 5, keep_candidates=True) == "a rollout"
    assert seen == [(actor.engine, prompts, sampling, 5, range(7, 9), True)]
