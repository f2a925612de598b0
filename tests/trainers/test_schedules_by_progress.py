"""Learning rates go by the place in the run: updates that were planned and never made do not put off the end."""

from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.algorithms.kl import UpdateRate
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.online_preference import OnlineConfig, OnlinePreferenceTrainer
from hybrid_rlhf.trainers.rejection_sampling import RejectionConfig, RejectionTrainer
from tests.factories.trainers import GROUPED, PROMPTS, Source, count_of, online, ppo, prompts_of, settings, varied_if


def updates_of(role, step) -> list[int]:
    """The places in the schedule that the updates of `step()` asked for."""
    seen, training = set(), role.engine.training
    schedule, training.schedule = training.schedule, lambda place: seen.add(place) or 1.0
    step()
    training.schedule = schedule
    return sorted(seen)


def test_after_an_early_stop_the_next_step_is_where_it_would_have_been():
    trainer = ppo(settings(num_ppo_epochs=8, early_stop_kl=1e-3), count_of(42), rate=1e-2)
    assert updates_of(trainer.roles.actor, lambda: trainer.step(PROMPTS)) == [0, 1]  # it stopped after two of eight
    trainer.config = replace(trainer.config, early_stop_kl=None)
    assert updates_of(trainer.roles.actor, lambda: trainer.step(PROMPTS)) == list(range(8, 16))
    assert updates_of(trainer.roles.critic, lambda: trainer.step(PROMPTS)) == list(range(16, 24))
    assert trainer.roles.actor.engine.training.num_steps == 18  # what a checkpoint has is what was made


def test_a_rollout_with_too_few_groups_that_teach_leaves_the_schedule_alone():
    trainer = online(settings(sampling=GROUPED, estimator="grpo", max_refills=1, minibatch_size=4),
                     varied_if(lambda t: t != "flat"), extra_prompts=lambda: prompts_of("flat", "flat", "flat"))
    assert updates_of(trainer.roles.actor, lambda: trainer.step(prompts_of("flat", "b", "flat"))) == [0]
    assert updates_of(trainer.roles.actor, lambda: trainer.step(prompts_of("a", "b", "c"))) == [3, 4, 5]


def test_the_actor_s_schedule_begins_with_its_first_update_and_the_critic_s_with_the_run():
    trainer = ppo(settings(critic_warmup_steps=1, num_ppo_epochs=2))
    assert updates_of(trainer.roles.actor, lambda: trainer.step(PROMPTS)) == []
    assert updates_of(trainer.roles.actor, lambda: trainer.step(PROMPTS)) == [0, 1]
    assert updates_of(trainer.roles.critic, lambda: trainer.step(PROMPTS)) == [4, 5]


@pytest.mark.parametrize("method", ["online_dpo", "rejection"])
def test_a_round_that_taught_nothing_counts_as_planned(method):
    roles = online(settings(), None).roles
    flat, sampling = Source(lambda r: torch.ones(len(r))), SamplingConfig(max_new_tokens=6, num_samples=2)
    if method == "online_dpo":
        trainer = OnlinePreferenceTrainer(roles, flat, OfflineTrainer(roles.actor, roles.ref, DPOConfig()),
                                          OnlineConfig(sampling), seed=0)
    else:
        trainer = RejectionTrainer(roles, flat, RejectionConfig(sampling, num_epochs=2), seed=0)
    trainer.step(PROMPTS)
    trainer.sampler.source = Source(lambda r: torch.arange(float(len(r))))
    expected = [1] if method == "online_dpo" else [2, 3]
    assert updates_of(roles.actor, lambda: trainer.step(PROMPTS)) == expected


def test_a_resumed_run_goes_on_at_its_place_in_the_schedule():
    first = ppo(settings(num_ppo_epochs=8, early_stop_kl=1e-3), count_of(42), rate=1e-2)
    first.step(PROMPTS)
    second = ppo(settings(num_ppo_epochs=8), count_of(42), rate=1e-2)
    second.load_state(first.state())
    assert updates_of(second.roles.actor, lambda: second.step(PROMPTS)) == list(range(8, 16))


def test_the_rate_goes_by_the_root_of_how_much_too_far_the_updates_went_and_comes_back_to_one_at_most():
    rate, values = UpdateRate(0.01), []
    for kl in (0.04, 0.09, 0.01, 0.0025, 0.0, 0.0, 0.0, 0.0):  # / 2, / 3, as asked; then by 1.5 a rollout at most
        rate.update(kl)
        values.append(rate.value)
    assert values == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 4, 3 / 8, 9 / 16, 27 / 32, 1])
    for kl, factor in ((50.0, 0.1), (float("nan"), 0.01), (float("inf"), 0.001)):  # a tenth a rollout, at least
        rate.update(kl)
        assert rate.value == pytest.approx(factor)
    for unset in (UpdateRate(None), UpdateRate(0.0)):
        unset.update(5.0)
        assert unset.value == 1


def test_update_kl_lowers_the_actor_s_rate_alone_and_goes_on_after_a_checkpoint():
    config = settings(num_ppo_epochs=4, update_kl=1e-9, kl_coef=0.0)  # nothing moves so little: a tenth each time
    trainer = ppo(config, count_of(42), rate=1e-2)
    found = [trainer.step(PROMPTS).compute() for _ in range(3)]
    assert [r["learning_rate"] for r in found] == pytest.approx([1e-2, 1e-3, 1e-4])
    assert [r["policy/rate_factor"] for r in found] == pytest.approx([1, 0.1, 0.01])
    assert [r["value/learning_rate"] for r in found] == pytest.approx([1e-2] * 3)
    resumed = ppo(config, count_of(42), rate=1e-2)
    resumed.load_state(trainer.state())
    assert resumed.step(PROMPTS).compute()["learning_rate"] == pytest.approx(1e-5)
    off = ppo(replace(config, update_kl=0.0), count_of(42), rate=1e-2)
    found = [off.step(PROMPTS).compute() for _ in range(2)]
    assert [r["learning_rate"] for r in found] == [1e-2, 1e-2] and "policy/rate_factor" not in found[0]
    with pytest.raises(UserError, match=r"ppo.update_kl is -0.01; it must not be negative"):
        settings(update_kl=-0.01)
    with pytest.raises(UserError, match="one update on a rollout never sees how far it moved"):
        settings(update_kl=0.01, num_ppo_epochs=1)
