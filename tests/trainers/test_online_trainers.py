"""The switches of the on-policy loop, each by its effect on whole steps of a tiny policy."""

import copy
from dataclasses import replace

import pytest
import torch

from hybrid_rlhf.algorithms.kl import UpdateRate
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.rewards.mixture import Scale
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.online_preference import OnlineConfig, OnlinePreferenceTrainer
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.trainers.rejection_sampling import RejectionConfig, RejectionTrainer
from tests.factories.trainers import (
    CLOCKED,
    GROUPED,
    PROMPTS,
    Source,
    count_of,
    online,
    ppo,
    prompts_of,
    settings,
    varied_if,
    weights,
)


def same(before, engine) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


@pytest.mark.parametrize("changes", [{"estimator": "grpo"}, {"estimator": "dr_grpo"},
                                     {"estimator": "grpo", "policy_loss": "gspo"},
                                     {"estimator": "grpo", "policy_loss": "gspo", "aggregation": "sum"},
                                     {"estimator": "grpo", "policy_loss": "sapo"},
                                     {"estimator": "grpo", "policy_loss": "vespo"},
                                     {"estimator": "gdpo", "top_entropy_quantile": 0.3, "max_off_policy_kl": 1e-9},
                                     {"estimator": "batch_grpo", "mask_truncated": True},
                                     {"estimator": "rloo", "importance": "token", "old_logprobs": "recompute"}],
                         ids=lambda c: "-".join(map(str, c.values())))
def test_a_step_without_a_critic_is_the_same_whatever_the_token_budget(changes):
    outcomes = []
    for max_tokens in (14, 8192):
        trainer = online(settings(sampling=GROUPED, num_minibatches=3, **changes), count_of(42), max_tokens, 1e-3)
        outcomes.append(trainer.step(PROMPTS).compute())
    for name, value in outcomes[0].items():
        if not name.startswith(CLOCKED) and not name.endswith("micro_batch_tokens"):
            assert outcomes[1][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert not any(name.startswith("value/") for name in outcomes[0])


def test_the_tokens_of_least_entropy_have_no_part_in_the_policy_loss():
    trainer = online(settings(sampling=GROUPED, estimator="grpo", num_minibatches=3, top_entropy_quantile=0.25),
                     count_of(42))
    metrics = trainer.step(PROMPTS).compute()
    assert metrics["policy/low_entropy_masked"] == pytest.approx(0.75, abs=0.02) and metrics["grad_norm"] > 0


@pytest.mark.parametrize("make", [ppo, online])
def test_responses_that_did_not_end_teach_nothing_and_stay_in_what_is_reported(make):
    changes = {} if make is ppo else {"estimator": "grpo", "sampling": GROUPED}
    trainer = make(settings(mask_truncated=True, kl_coef=0.0, **changes), count_of(42), rate=1e-2)
    sample, ended = trainer._sample, torch.zeros(12 if make is ppo else 48, dtype=torch.bool)

    def sampled(*given):
        rollout = sample(*given)
        rollout.has_eos = ended
        return rollout

    trainer._sample = sampled
    before = weights(trainer.roles.actor.engine)
    metrics = trainer.step(PROMPTS).compute()
    assert metrics["completions/mean_length"] > 1 and metrics["grad_norm"] == 0 and "policy/loss" not in metrics
    assert same(before, trainer.roles.actor.engine)
    ended[:] = True
    assert trainer.step(PROMPTS).compute()["grad_norm"] > 0 and not same(before, trainer.roles.actor.engine)


def test_gdpo_takes_each_source_once_with_a_judge_s_items_within_it_and_the_penalties_as_one_more():
    trainer = online(settings(sampling=GROUPED, estimator="gdpo", missing_eos_penalty=1.0), Source(lambda r: [0.0]))
    rollout = Rollout.from_responses(prompts_of(*"abcd"), [[5]] * 4, [True, True, False, False], 0, [])
    rollout.scores, third = torch.tensor([0.0, 1.0, 2.0, 3.0]), (1 / 3) ** 0.5 + 1e-4  # the spread of 0, 0, 1, 1
    spread, penalties = (5 / 3) ** 0.5 + 1e-4, torch.tensor([0.5, 0.5, -0.5, -0.5]) / third
    trainer.shape(rollout)  # a source alone has no weight
    centred = rollout.scores - 1.5
    torch.testing.assert_close(rollout.shaped_scores, centred / spread + penalties)
    rollout.source_scores = {"judge": 9 * rollout.scores, "judge/clear": rollout.scores, "length": -rollout.scores}
    rollout.source_weights = {"judge": 2.0, "judge/clear": 5.0, "length": 0.5}
    trainer.shape(rollout)
    torch.testing.assert_close(rollout.shaped_scores, 2 * centred / spread - 0.5 * centred / spread + penalties,
                               rtol=1e-3, atol=1e-3)


def test_scores_are_bounded_before_the_penalties():
    trainer = online(settings(sampling=GROUPED, estimator="grpo", min_score=-1.0, max_score=0.5,
                              missing_eos_penalty=2.0), Source(lambda r: torch.arange(len(r)) - 3.0))
    trainer.step(PROMPTS)
    rollout = trainer.last_rollout
    expected = (torch.arange(48) - 3.0).clamp(-1, 0.5) - 2.0 * (~rollout.has_eos).float()
    torch.testing.assert_close(rollout.shaped_scores, expected)
    assert rollout.scores.max() == 44


def test_grpo_learns_to_say_a_rewarded_token():
    trainer = online(settings(sampling=GROUPED, estimator="grpo", num_ppo_epochs=2, kl_coef=0.0), count_of(42))
    scores = [trainer.step(PROMPTS).compute()["reward"] for _ in range(25)]
    assert sum(scores[-5:]) / 5 > 10 * max(sum(scores[:5]) / 5, 0.2)


def test_a_price_of_kl_in_the_loss_pulls_back_to_the_reference():
    far = online(settings(sampling=GROUPED, estimator="grpo", num_ppo_epochs=2, kl_coef=0.0), count_of(42))
    near = online(settings(sampling=GROUPED, estimator="grpo", num_ppo_epochs=2, kl_coef=2.0), count_of(42))
    kl = [[t.step(PROMPTS).compute()["kl"] for _ in range(15)][-1] for t in (far, near)]
    assert kl[0] > 4 * abs(kl[1])


def test_the_critic_warms_up_alone():
    trainer = ppo(settings(critic_warmup_steps=1))
    actor, critic = (weights(r.engine) for r in (trainer.roles.actor, trainer.roles.critic))
    first = trainer.step(PROMPTS).compute()
    assert same(actor, trainer.roles.actor.engine) and not same(critic, trainer.roles.critic.engine)
    assert "policy/loss" not in first and "value/loss" in first
    assert "policy/loss" in trainer.step(PROMPTS).compute() and not same(actor, trainer.roles.actor.engine)


def test_updates_on_a_rollout_stop_at_the_kl_bound():
    trainer = ppo(settings(num_ppo_epochs=8, early_stop_kl=1e-3), count_of(42), rate=1e-2)
    assert trainer.step(PROMPTS).compute()["policy/early_stop"] == 1
    assert trainer.roles.actor.engine.training.num_steps == 2  # the first finds no KL, the second finds too much
    calm = ppo(settings(num_ppo_epochs=2, early_stop_kl=1e3))
    assert calm.step(PROMPTS).compute()["policy/early_stop"] == 0
    assert calm.roles.actor.engine.training.num_steps == 2
    off = ppo(settings(num_ppo_epochs=8, early_stop_kl=0.0), count_of(42), rate=1e-2)
    assert "policy/early_stop" not in off.step(PROMPTS).compute()
    assert off.roles.actor.engine.training.num_steps == 8


def test_an_entropy_bonus_keeps_the_policy_wide():
    entropies = []
    for coef in (0.0, 0.5):
        trainer = online(settings(sampling=GROUPED, estimator="grpo", num_ppo_epochs=2, kl_coef=0.0, entropy_coef=coef),
                         count_of(42))
        entropies.append([trainer.step(PROMPTS).compute()["entropy"] for _ in range(12)][-1])
    assert entropies[1] > entropies[0] + 0.1


def test_the_method_s_rows_decide_where_nothing_is_given_and_what_is_given_wins():
    def of(**changes):
        config = PPOConfig(sampling=GROUPED, **changes)
        return config.needs_critic, config.kl_in_reward, config.kl_kind, config.averaging, config.whitens

    assert of() == (True, True, "k1", "token", True)
    assert of(estimator="grpo") == (False, False, "k3", "sequence", False)
    assert of(estimator="dr_grpo") == (False, False, "k3", "constant", False)
    assert of(estimator="rloo", policy_loss="ppo_sequence") == (False, True, "k1", "sequence", False)
    assert of(estimator="grpo", policy_loss="cispo")[3] == of(estimator="grpo", policy_loss="vespo")[3] == "token"
    assert of(estimator="dr_grpo", policy_loss="sapo")[3] == "sequence"
    assert of(estimator="grpo", kl_in="reward", aggregation="token", whiten_advantages=True) == (
        False, True, "k1", "token", True)
    with pytest.raises(UserError, match=r"num_samples is 1; give 2 or more"):
        PPOConfig(estimator="grpo")


def test_groups_that_teach_nothing_are_replaced_from_new_prompts():
    fresh = iter([prompts_of("flat", "c", "flat"), prompts_of("d", "e", "f")])
    trainer = online(settings(sampling=GROUPED, estimator="grpo", max_refills=5), varied_if(lambda t: t != "flat"),
                     extra_prompts=lambda: next(fresh))
    metrics = trainer.step(prompts_of("a", "flat", "flat")).compute()
    rollout = trainer.last_rollout
    assert rollout.prompts.texts == ["a"] * 4 + ["c"] * 4 + ["d"] * 4  # what was accepted, in its order; no more
    assert rollout.prompts.columns["n"] == [0] * 4 + [1] * 4 + [0] * 4
    assert (metrics["refill/rounds"], metrics["refill/filled"]) == (2, 1)
    assert metrics["frac_reward_zero_std"] == pytest.approx(4 / 9)
    assert rollout.scores.tolist() == [0.0, 1.0, 2.0, 3.0] * 3
    # every number still stands beside its own tokens
    torch.testing.assert_close(rollout.ref_logprobs, trainer.roles.ref.logprobs(rollout), rtol=1e-4, atol=1e-5)
    assert not rollout.logprobs[~rollout.action_mask].any() and rollout.rewards.shape == rollout.action_mask.shape


def test_what_was_accepted_is_trained_on_when_the_rounds_end_and_nothing_accepted_is_no_empty_step():
    given = [prompts_of("flat", "flat", "flat")] * 9
    trainer = online(settings(sampling=GROUPED, estimator="grpo", max_refills=2), varied_if(lambda t: t != "flat"),
                     extra_prompts=given.pop)
    metrics = trainer.step(prompts_of("flat", "b", "flat")).compute()
    assert len(given) == 7 and trainer.last_rollout.prompts.texts == ["b"] * 4 and metrics["grad_norm"] > 0
    assert metrics["refill/filled"] == pytest.approx(1 / 3)
    assert len(trainer._sample(prompts_of("flat", "flat", "flat"), Metrics())) == 12
    assert len(given) == 5


def test_groups_are_judged_by_what_is_paid_and_not_by_the_score():
    ended = torch.tensor([True, False, True, False] * 3)

    def scored(rollout):
        rollout.has_eos = ended[: len(rollout)]
        return torch.ones(len(rollout))  # one score for all: only half of them ended

    flat = online(settings(sampling=GROUPED, estimator="grpo"), Source(scored)).step(prompts_of("a", "b", "c"))
    paid = online(settings(sampling=GROUPED, estimator="grpo", missing_eos_penalty=1.0, max_refills=1), Source(scored),
                  extra_prompts=lambda: pytest.fail("no group is to be replaced")).step(prompts_of("a", "b", "c"))
    assert flat.compute()["frac_reward_zero_std"] == 1 and paid.compute()["frac_reward_zero_std"] == 0
    assert paid.compute()["grad_norm"] > 0


def test_a_group_whose_scores_are_all_beyond_the_bound_is_flat():
    trainer = online(settings(sampling=GROUPED, estimator="grpo"), varied_if(lambda t: t == "a"))
    trainer.scale = Scale(-10.0, 1.0, 5.0)  # scores 0 to 3 are 10 to 13 deviations up: all are paid 5
    metrics = trainer.step(prompts_of("a", "b", "c")).compute()
    assert metrics["frac_reward_zero_std"] == metrics["score/clip_fraction"] == 1


def test_equal_scores_of_any_size_are_no_advantage_to_the_bit():
    trainer = online(settings(sampling=SamplingConfig(max_new_tokens=10, num_samples=8), estimator="grpo", kl_coef=0.0),
                     Source(lambda r: torch.full((len(r),), 73.3)))
    assert trainer.step(prompts_of("a", "b", "c")).compute()["grad_norm"] == 0


@pytest.mark.parametrize("policy_loss", ["gspo", "ppo_sequence"])
def test_a_ratio_of_sequences_starts_from_recomputed_logprobs_however_small_the_drift(policy_loss):
    config = settings(sampling=GROUPED, estimator="grpo", policy_loss=policy_loss, cliprange_low=3e-4,
                      cliprange_high=4e-4)
    trainer = online(config, count_of(42))

    def drifted(*inputs):  # a sampler whose kernels differ from training's by a tenth of what auto bears of tokens
        rollout = generate(*inputs)
        rollout.sampled_logprobs += 2e-3 * rollout.action_mask
        return rollout

    generate, trainer.roles.actor.generate = trainer.roles.actor.generate, drifted
    metrics = trainer.step(PROMPTS).compute()
    assert metrics["policy/clip_fraction"] == 0 and metrics["policy/ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["engine/logprob_drift"] == pytest.approx(2e-3, rel=0.01)
    of_tokens = online(settings(sampling=GROUPED, estimator="grpo"), count_of(42))
    generate, of_tokens.roles.actor.generate = of_tokens.roles.actor.generate, drifted
    assert of_tokens.step(PROMPTS).compute()["policy/ratio"] == pytest.approx(0.998, abs=1e-4)


def test_a_rollout_is_scored_and_trained_at_the_temperature_that_it_was_sampled_at():
    """The log-probabilities of plain logits divided by 0.5; the first update's ratio is 1 there, and at 1 it is not."""
    sampling = SamplingConfig(max_new_tokens=10, num_samples=4, temperature=0.5)
    trainer = online(settings(sampling=sampling, estimator="grpo", old_logprobs="recompute"), count_of(42))
    plain = copy.deepcopy(trainer.roles.actor.engine.model)
    metrics = trainer.step(prompts_of("a", "b", "c")).compute()
    rollout = trainer.last_rollout
    assert rollout.temperature == rollout.rows(torch.arange(2)).temperature == (rollout + rollout).temperature == 0.5
    for i in (0, 5):
        prompt, response = rollout.prompts.ids[i], rollout.response_ids[i][rollout.action_mask[i]].tolist()
        logits = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1:-1] / 0.5
        by_hand = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        assert torch.allclose(rollout.logprobs[i][rollout.action_mask[i]], by_hand, atol=1e-4)
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["engine/logprob_drift"] < 1e-4


def test_a_step_that_earned_nothing_reaches_the_estimator_as_a_step():
    """Four steps of one token worth 1, 0 | 0, 0: mean 1/4, deviations 3/4 and -1/4, spread sqrt(3/4 / 3) = 1/2."""
    sampling = SamplingConfig(max_new_tokens=2, num_samples=2)
    run = online(settings(estimator="process_grpo", sampling=sampling), Source(None))
    rollout = Rollout.from_responses(Prompts([[5], [5]], ["x", "x"]), [[6, 7], [8, 9]], [True, True], 0, ["a", "b"])
    rollout.logprobs = rollout.ref_logprobs = torch.zeros(2, 2)
    rollout.shaped_scores, rollout.token_scores = torch.tensor([1.0, 0.0]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    rollout.step_ends = torch.ones(2, 2, dtype=torch.bool)
    run.estimate(rollout, Metrics())
    torch.testing.assert_close(rollout.advantages, torch.tensor([[0.5, -0.25], [-0.5, -0.25]]) / 0.5001)


SKIPPED = [1.0, None, 3.0, 5.0, None, 7.0, None, None] + [None] * 4 + [0.0, 2.0, 4.0, None]


def test_a_response_that_every_source_skips_is_left_out_of_baseline_and_loss_and_counted():
    """The step is the one on the other responses alone, with the advantages that stand here by hand."""
    source = Source(lambda rollout: SKIPPED[: len(rollout)])
    trainer = online(settings(sampling=GROUPED, estimator="dr_grpo", kl_coef=0.0, aggregation="sequence"), source)
    twin = copy.deepcopy(trainer.roles.actor.engine.model)
    metrics = trainer.step(PROMPTS.rows(range(4))).compute()
    rollout = trainer.last_rollout
    wanted = {0: -2.0, 2: 0.0, 3: 2.0, 5: 0.0, 12: -2.0, 13: 0.0, 14: 2.0}  # row -> score less the mean of its group's
    losses = []
    for row, advantage in wanted.items():
        prompt, answer = rollout.prompts.ids[row], rollout.response_ids[row][rollout.action_mask[row]]
        logits = twin(torch.tensor([[*prompt, *answer.tolist()]])).logits[0, len(prompt) - 1: -1]
        logprobs = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
        losses.append(-advantage * (logprobs - logprobs.detach()).exp().mean())
    (sum(losses) / len(wanted)).backward()
    norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert metrics["completions/unscored_ratio"] == 9 / 16 and metrics["reward"] == pytest.approx(22 / 7)
    assert metrics["completions/mean_length"] == pytest.approx(rollout.action_mask.sum().item() / 16)
    assert metrics["frac_reward_zero_std"] == 0.5  # a lone score and none are no spread
    assert len(rollout) == 16


def test_a_critic_learns_from_scored_responses_alone_and_a_step_without_any_changes_nothing():
    trainer = ppo(settings(), Source(lambda rollout: [None, 3.0, 5.0, None][: len(rollout)]))
    trainer.roles.critic.is_new = True
    metrics = trainer.step(PROMPTS.rows(range(4))).compute()
    assert (trainer.roles.critic.mean, trainer.roles.critic.std) == (4, 1)  # of 3 and 5
    assert metrics["grad_norm"] > 0 and not trainer.last_rollout.advantages[[0, 3]].any()
    before = [weights(role.engine) for role in (trainer.roles.actor, trainer.roles.critic)]
    trainer.source.score = lambda rollout: [None] * len(rollout)
    metrics = trainer.step(PROMPTS.rows(range(4))).compute()
    assert metrics["completions/unscored_ratio"] == 1 and "grad_norm" not in metrics and "reward" not in metrics
    assert same(before[0], trainer.roles.actor.engine) and same(before[1], trainer.roles.critic.engine)


# --- Learning rates go by the place in the run: updates that were planned and never made do not put off the end

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
