"""What one step is: gradients that no split moves, ratio 1 at first, rewards once, and methods that learn."""

import copy

import pytest
import torch

from hybrid_rlhf.core.errors import NotFinite, UserError
from hybrid_rlhf.core.random_state import preserved
from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine.train.accumulate import rehearsal
from hybrid_rlhf.models.dropout import disable_dropout
from hybrid_rlhf.rewards import BadScore
from hybrid_rlhf.rewards.mixture import Scale
from hybrid_rlhf.roles import Actor, Critic, Reward
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.run.train_config import TrainConfig
from hybrid_rlhf.trainers.ppo import PPOConfig
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from hybrid_rlhf.training import step3_ppo
from tests.factories.trainers import (
    CLOCKED,
    PROMPTS,
    SFT_ROWS,
    Source,
    count_of,
    policy,
    ppo,
    scalar,
    settings,
    trained,
    weights,
)


@pytest.mark.parametrize("max_tokens", [1, 9, 8192])
def test_sft_takes_the_same_step_whatever_the_token_budget_and_prompts_teach_nothing(max_tokens):
    engine = trained(policy())
    twin = copy.deepcopy(engine.model)
    metrics = SFTTrainer(Actor(engine, None, max_tokens)).step(collate_sft(SFT_ROWS, 0)).compute()
    losses = []
    for row in SFT_ROWS:
        logprobs = twin(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, row["input_ids"][t]] for t in range(len(row["input_ids"])) if row["loss_mask"][t]]
    loss = torch.stack(losses).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    norm = torch.cat([p.grad.flatten() for p in twin.parameters()]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 20, 8192])
def test_the_reward_step_is_the_same_whatever_the_token_budget(max_tokens):
    rows = [{"chosen_ids": [5, 6, 7, 3], "rejected_ids": [5, 6, 8, 9, 10, 3], "num_prompt_tokens": 2},
            {"chosen_ids": [11, 12, 13, 14, 3], "rejected_ids": [11, 3], "num_prompt_tokens": 1},
            {"chosen_ids": [15, 16, 3], "rejected_ids": [15, 17, 18, 3], "num_prompt_tokens": 1}]
    engine = trained(scalar())
    twin = copy.deepcopy(engine.module.model)
    metrics = RewardTrainer(Reward(engine, max_tokens)).step(collate_pairs(rows, 0)).compute()
    scores = [[twin(torch.tensor([r[k]])).logits[0, 0] for k in ("chosen_ids", "rejected_ids")] for r in rows]
    loss = torch.stack([-torch.nn.functional.logsigmoid(c - r) for c, r in scores]).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(sum(float(c > r) for c, r in scores) / 3)
    norm = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_role_numbers_equal_the_plain_forward_s_at_every_action():
    rollout = Rollout.from_responses(Prompts([[5, 6], [7, 8, 9]], ["a", "b"]), [[10, 11, 3], [12]], [True, False], 0,
                                     ["", ""])
    rollout.temperature = 0.7
    actor, critic, reward = Actor(policy(), None, 6), Critic(scalar(2), 6), Reward(scalar(1), 6)
    logprobs, values, scores = actor.logprobs(rollout), critic.values(rollout), reward.score_rollout(rollout)
    for i, (prompt, response) in enumerate([([5, 6], [10, 11, 3]), ([7, 8, 9], [12])]):
        ids = torch.tensor([prompt + response])
        plain = (actor.engine.model(ids).logits[0] / 0.7).log_softmax(-1)
        states = critic.engine.module.model.model(ids).last_hidden_state @ critic.engine.module.model.score.weight.T
        for t, token in enumerate(response):
            assert logprobs[i, t].item() == pytest.approx(plain[len(prompt) + t - 1, token].item(), abs=1e-5)
            assert values[i, t].item() == pytest.approx(states[0, len(prompt) + t - 1, 0].item(), abs=1e-5)
        assert scores[i].item() == pytest.approx(reward.engine.module.model(ids).logits.item(), abs=1e-5)
    assert not logprobs[~rollout.action_mask].any() and not values[~rollout.action_mask].any()


def test_the_first_update_has_ratio_one_and_clips_nothing_even_where_the_checkpoint_has_dropout():
    trainer = ppo(settings())
    trainer.roles.actor.engine.model.config.attention_dropout = 0.5
    for layer in trainer.roles.actor.engine.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    disable_dropout(trainer.roles.actor.engine.model)
    metrics = trainer.step(PROMPTS).compute()
    assert metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["policy/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["policy/clip_fraction"] == metrics["value/clip_fraction"] == 0
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-5)


def test_the_ppo_step_is_the_same_whatever_the_token_budget():
    outcomes = []
    for max_tokens in (14, 40, 8192):
        trainer = ppo(settings(num_ppo_epochs=2, num_minibatches=2), max_tokens=max_tokens)
        outcomes.append(trainer.step(PROMPTS).compute())
    for other in outcomes[1:]:
        for name, value in outcomes[0].items():
            if not name.startswith(CLOCKED) and not name.endswith("micro_batch_tokens"):
                assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_num_minibatches_and_minibatch_size_have_their_effect():
    for config, steps in ((settings(num_ppo_epochs=3, num_minibatches=4), 12), (settings(minibatch_size=5), 3),
                          (settings(), 1)):
        trainer = ppo(config)
        trainer.step(PROMPTS)
        assert trainer.roles.actor.engine.training.num_steps == trainer.roles.critic.engine.training.num_steps == steps


def test_a_minibatch_that_does_not_divide_by_the_processes_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(step3_ppo, "world_size", lambda: 3)

    def of(**changes):
        return step3_ppo.Config(train=TrainConfig(per_device_train_batch_size=8),
                                ppo=PPOConfig(num_ppo_epochs=4, **({"num_minibatches": 1} | changes)))

    assert step3_ppo.updates_per_step(of()) == 4  # 8 prompts on each of three processes, four epochs
    with pytest.raises(UserError, match="minibatch_size: a minibatch of 4 of the step's 24 sequences does not divide"):
        of(minibatch_size=4)
    with pytest.raises(UserError, match=r"num_minibatches: a minibatch of 4 .* by the 3 processes"):
        of(num_minibatches=6)


def test_scores_and_rewards_are_computed_once_per_rollout_not_once_per_epoch():
    calls = []
    source = Source(lambda rollout: (calls.append(1), torch.zeros(len(rollout)))[1])
    ppo(settings(num_ppo_epochs=4), source).step(PROMPTS)
    assert len(calls) == 1


def test_ref_and_reward_do_not_move_and_a_critic_s_step_does_not_touch_the_actor():
    trainer = ppo(settings(num_ppo_epochs=2))
    fixed = [trainer.roles.ref.engine, trainer.source.role.engine]
    before = [weights(e) for e in fixed]
    trainer.step(PROMPTS)
    for engine, old in zip(fixed, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, engine.module.parameters(), strict=True))
    actor = weights(trainer.roles.actor.engine)
    trainer.roles.critic.update(trainer.last_rollout, trainer.critic_loss)
    assert all(torch.equal(a, b) for a, b in zip(actor, trainer.roles.actor.engine.module.parameters(), strict=True))


@pytest.mark.parametrize("answer, message", [
    (lambda r: torch.full((len(r),), float("nan")), "test: score nan for response 0"),
    (lambda r: torch.zeros(len(r) + 1), "12 responses, scores of shape"),
])
def test_a_source_that_answers_nonsense_stops_the_step_by_name_and_nothing_is_trained(answer, message):
    trainer = ppo(settings(), Source(answer))
    before = weights(trainer.roles.actor.engine)
    with pytest.raises(BadScore, match=message):
        trainer.step(PROMPTS)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.roles.actor.engine.module.parameters(), strict=True))


def test_the_missing_eos_penalty_and_the_clip_act_on_the_normalised_score():
    trainer = ppo(settings(missing_eos_penalty=1.0))
    trainer.scale = Scale(2.0, 0.5, 1.5)
    rollout = Rollout.from_responses(Prompts([[5]] * 3, ["x"] * 3), [[6, 3], [7], [8, 3]], [True, False, True], 0, [])
    rollout.scores = torch.tensor([2.5, 2.0, 9.0])
    trainer.shape(rollout)
    assert rollout.shaped_scores.tolist() == [1.0, -1.0, 1.5]
    assert rollout.is_clipped.tolist() == [False, False, True]
    assert rollout.metrics().compute()["score/clip_fraction"] == pytest.approx(1 / 3)


def test_scores_that_nobody_normalised_are_paid_whole_and_teach():
    marks = Source(lambda rollout: 60.0 + 10 * count_of(42).score(rollout))  # of a function that marks up to 100
    trainer = ppo(settings(score_clip=5.0, normalise_scores=True), marks)
    metrics = trainer.step(PROMPTS).compute()
    assert trainer.last_rollout.shaped_scores.min() >= 60 and trainer.last_rollout.rewards.max() >= 59
    assert "score/clip_fraction" not in metrics and metrics["grad_norm"] > 0


def test_gamma_and_lam_stay_what_they_were_and_kl_coef_adapts_once_per_step():
    trainer = ppo(settings(kl_target=1.0, kl_coef=0.1, kl_horizon=100))
    trainer.step(PROMPTS)
    assert (trainer.config.gamma, trainer.config.lam) == (1.0, 0.95)
    assert trainer.kl_coef.value == pytest.approx(0.1 * (1 - 0.2 * 12 / 100))  # no KL yet: the full step down


def test_a_critic_whose_values_are_not_finite_is_named_with_what_to_lower_and_the_rollout_is_kept():
    trainer = ppo(settings())
    with torch.no_grad():
        for weight in trainer.roles.critic.engine.module.parameters():
            weight.fill_(float("nan"))
    with pytest.raises(NotFinite, match=r"critic's values.*lower roles\.critic\.learning_rate.*ppo\.score_clip"):
        trainer.step(PROMPTS)
    assert trainer.last_rollout.values.isnan().any()


def test_ppo_learns_to_say_a_rewarded_token():
    trainer = ppo(settings(num_ppo_epochs=4, num_minibatches=2, kl_coef=0.0), count_of(42), rate=1e-2)
    scores = [trainer.step(PROMPTS).compute()["reward"] for _ in range(40)]
    assert sum(scores[-5:]) / 5 > 10 * max(sum(scores[:5]) / 5, 0.2)


def test_a_rehearsed_step_changes_no_weight_no_moment_and_no_number_drawn():
    def steps(rehearses):
        torch.manual_seed(0)
        engine = trained(policy(attention_dropout=0.3))
        trainer, batch, losses = SFTTrainer(Actor(engine, None, 9)), collate_sft(SFT_ROWS, 0), []
        for _ in range(2):
            if rehearses:
                with rehearsal(), preserved():
                    copy.copy(trainer).step(batch)
            losses.append(trainer.step(batch).compute())
        return losses, weights(engine)

    plain, rehearsed = steps(False), steps(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[1], rehearsed[1], strict=True))
    for one, other in zip(plain[0], rehearsed[0], strict=True):
        assert {k: v for k, v in one.items() if not k.startswith(CLOCKED)} == {
            k: v for k, v in other.items() if not k.startswith(CLOCKED)}
