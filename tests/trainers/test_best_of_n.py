"""Online DPO and rejection sampling: who is best and worst, steps by hand in plain torch, and that both learn."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hybrid_rlhf.algorithms.preference import LOSSES, best_and_worst, best_at_least
from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.roles import Actor, Reference, Roles
from hybrid_rlhf.rollout import Prompts
from hybrid_rlhf.trainers.offline import DPOConfig, OfflineTrainer
from hybrid_rlhf.trainers.online_preference import OnlineConfig, OnlinePreferenceTrainer
from hybrid_rlhf.trainers.ppo_config import PPOConfig
from hybrid_rlhf.trainers.rejection_sampling import RejectionConfig, RejectionTrainer
from tests.factories.pairs import plain_pair_loss
from tests.factories.tiny import tiny_tokenizer
from tests.factories.trainers import PROMPTS, Source, count_of, policy, trained, weights

NAN = math.nan
FEW = Prompts([[5, 6, 7], [8, 9], [10, 11, 12, 13]], ["a", "b", "c"], {"n": [0, 1, 2]})
OF_FOUR = SamplingConfig(max_new_tokens=10, num_samples=4)
# scores of three groups of four: the best is 2 and the worst 1; a tie and a skipped one; nothing to tell apart
SCORES = [1.0, 0.0, 5.0, 2.0, NAN, 3.0, 3.0, -1.0, 4.0, NAN, 4.0, 4.0]


def roles_of(seed_of_ref=0, max_tokens=8192, rate=1e-2, **options):
    return Roles(Actor(trained(policy(0, **options), rate), tiny_tokenizer(), max_tokens),
                 None if seed_of_ref is None else Reference(policy(seed_of_ref, **options), max_tokens))


def online(source, loss_type="sigmoid", size=4, temperature=1.0, **options):
    row = LOSSES[loss_type]
    roles = roles_of(**({} if row.needs_reference else {"seed_of_ref": None}) | options)
    config = OnlineConfig(SamplingConfig(max_new_tokens=10, num_samples=size, temperature=temperature))
    return OnlinePreferenceTrainer(roles, source, OfflineTrainer(roles.actor, roles.ref, DPOConfig(loss_type)), config,
                                   seed=0, needs_pairs=row.needs_pairs)


def rejection(source, seed_of_ref=0, max_tokens=8192, rate=1e-2, **changes):
    config = RejectionConfig(**({"sampling": OF_FOUR} | changes))
    return RejectionTrainer(roles_of(seed_of_ref, max_tokens, rate), source, config, seed=0)


def answers(scores):
    """A source that gives these scores, None for NaN, whatever it is asked."""
    return Source(lambda rollout: [None if math.isnan(s) else s for s in scores][: len(rollout)])


def test_best_and_worst_by_hand():
    best, worst = best_and_worst(torch.tensor(SCORES), 4)
    assert (best.tolist(), worst.tolist()) == ([2, 5], [1, 7])
    best, worst = best_and_worst(torch.tensor([NAN, NAN, 1.0, NAN, -2.0, -3.0]), 2)
    assert (best.tolist(), worst.tolist()) == ([4], [5])  # one score alone is neither better nor worse
    assert best_at_least(torch.tensor(SCORES), 4, 4.0).tolist() == [2, 8]  # equal scores above the bar are good enough
    assert best_at_least(torch.tensor([NAN, 1.0]), 1, 1.0).tolist() == [1]
    assert [len(x) for x in best_and_worst(torch.zeros(0), 4)] == [0, 0]


def plain_logprobs(model, rollout, row):
    """log p of each token of a response, by the model's own forward on this row alone."""
    prompt = rollout.prompts.ids[row]
    answer = rollout.response_ids[row][rollout.action_mask[row]]
    ids = torch.tensor([[*prompt, *answer.tolist()]])
    return model(ids).logits[0, len(prompt) - 1: -1].log_softmax(-1).gather(1, answer[:, None])[:, 0]


def norm_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()


@pytest.mark.parametrize(("loss_type", "temperature"), [
    ("sigmoid", 1.0), ("ipo", 1.0), ("hinge", 1.0), ("orpo", 1.0), ("simpo", 1.0),
    ("sigmoid", 0.7), ("sigmoid", 1.3), ("ipo", 1.3), ("hinge", 0.7), ("orpo", 0.7), ("simpo", 1.3)])
def test_a_step_of_online_dpo_is_the_loss_of_best_and_worst_by_hand(loss_type, temperature):
    trainer = online(answers(SCORES), loss_type, temperature=temperature,
                     **({"seed_of_ref": 3} if LOSSES[loss_type].needs_reference else {}))
    twin = copy.deepcopy(trainer.roles.actor.engine.model)
    metrics = trainer.step(FEW).compute()
    rollout = trainer.sampler.last_rollout
    reference = trainer.roles.ref.engine.model if trainer.roles.ref else twin
    pairs = [[plain_logprobs(twin, rollout, i) for i in rows] for rows in ((2, 1), (5, 7))]
    with torch.no_grad():
        start = [[plain_logprobs(reference, rollout, i) for i in rows] for rows in ((2, 1), (5, 7))]
    loss = sum(plain_pair_loss(*p, *s, loss_type) for p, s in zip(pairs, start, strict=True)) / 2
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm_of(twin), rel=1e-3)
    assert metrics["pairs/kept"] == pytest.approx(2 / 3)
    assert metrics["pairs/score_margin"] == pytest.approx((5 + 4) / 2)
    assert metrics["reward"] == pytest.approx(25 / 10)  # over what was scored
    assert ("kl" in metrics) == LOSSES[loss_type].needs_reference


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo", "hinge", "kto"])
def test_a_policy_that_is_its_reference_has_no_margin_whatever_the_temperature(loss_type, temperature):
    metrics = online(answers(SCORES), loss_type, temperature=temperature).step(FEW).compute()
    for name in ("chosen", "rejected", "margins"):
        assert metrics[f"rewards/{name}"] == pytest.approx(0, abs=2e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_kto_takes_the_best_as_desirable_and_the_worst_as_not(temperature):
    trainer = online(answers(SCORES), "kto", temperature=temperature, seed_of_ref=3)
    twin, reference = copy.deepcopy(trainer.roles.actor.engine.model), trainer.roles.ref.engine.model
    metrics = trainer.step(FEW).compute()
    rollout, rows = trainer.sampler.last_rollout, [2, 5, 1, 7]
    ratios = torch.stack([(plain_logprobs(twin, rollout, i) - plain_logprobs(reference, rollout, i)).sum()
                          for i in rows])
    crossed = copy.copy(rollout)  # each prompt with the nearest response before it to another prompt, in a circle
    crossed.response_ids, crossed.action_mask = rollout.response_ids.clone(), rollout.action_mask.clone()
    for i, other in zip(rows, [11, 3, 11, 3], strict=True):
        crossed.response_ids[i], crossed.action_mask[i] = rollout.response_ids[other], rollout.action_mask[other]
    kl = torch.stack([(plain_logprobs(twin, crossed, i) - plain_logprobs(reference, crossed, i)).sum()
                      for i in rows]).mean().clamp(min=0)
    losses = 1 - torch.sigmoid(torch.tensor([1, 1, -1, -1]) * 0.1 * (ratios - kl.detach()))
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert metrics["kto/kl"] == pytest.approx(kl.item(), rel=1e-4, abs=1e-6)
    assert metrics["kl"] == pytest.approx(rollout.mean_kl(), rel=1e-4)  # that of all samples


@pytest.mark.parametrize(("texts", "others"), [([[5, 6, 7], [8, 9], [10]], [(2, 11), (1, 11)]),
                                               ([[5], [5], [8, 9]], [(2, 11), (1, 11)]), ([[5], [5], [5]], [])])
def test_kto_s_kl_is_never_measured_on_an_answer_to_the_same_prompt(texts, others, monkeypatch):
    one_pair = [1.0, 0.0, 2.0, 1.0, *[1.0] * 8]  # only the first prompt's scores differ: it is chosen twice
    trainer, asked = online(answers(one_pair), "kto", seed_of_ref=3), []
    step = trainer.learner.step
    monkeypatch.setattr(trainer.learner, "step", lambda batch, start: asked.append(batch) or step(batch, start))
    metrics = trainer.step(Prompts(texts, ["x"] * 3)).compute()
    rollout, mismatched = trainer.sampler.last_rollout, asked[0].mismatched
    wanted = [texts[0] + rollout.response_ids[j][rollout.action_mask[j]].tolist() for _, j in others]
    assert [row[mask].tolist() for row, mask in zip(mismatched.input_ids, mismatched.attention_mask, strict=True)
            ] == wanted
    assert metrics["loss"] > 0 and (metrics["kto/kl"] == 0 if not others else "kto/kl" in metrics)


def test_the_reference_is_asked_once_and_small_micro_batches_change_nothing(monkeypatch):
    outcomes = []
    for max_tokens in (12, 8192):
        trainer = online(answers(SCORES), seed_of_ref=3, max_tokens=max_tokens)
        monkeypatch.setattr(trainer.roles.ref, "sequence_logprobs", None)  # collect has asked it
        outcomes.append(trainer.step(FEW).compute())
    for name in ("loss", "grad_norm", "rewards/margins", "kl"):
        assert outcomes[0][name] == pytest.approx(outcomes[1][name], rel=1e-4)


@pytest.mark.parametrize("scores", [[1.0] * 12, [NAN] * 12])
@pytest.mark.parametrize("make", [online, rejection])
def test_a_round_that_tells_nothing_changes_nothing(make, scores):
    trainer = make(answers(scores))
    before = weights(trainer.roles.actor.engine)
    metrics = trainer.step(FEW).compute()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer.roles.actor.engine), strict=True))
    assert metrics.get("pairs/kept", metrics.get("rejection/kept")) == 0
    assert "grad_norm" not in metrics and ("reward" in metrics) == (scores[0] == 1)
    assert trainer.samples()[0]["score"] == (1 if scores[0] == 1 else None)


def test_a_round_of_rejection_is_the_cross_entropy_of_the_best_by_hand():
    trainer = rejection(answers(SCORES))
    twin = copy.deepcopy(trainer.roles.actor.engine.model)
    metrics = trainer.step(FEW).compute()
    rollout = trainer.sampler.last_rollout
    loss = -torch.cat([plain_logprobs(twin, rollout, i) for i in (2, 5)]).mean()
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm_of(twin), rel=1e-3)
    assert metrics["rejection/kept"] == pytest.approx(2 / 3) and metrics["rejection/chosen_score"] == 4
    assert trainer.roles.actor.engine.training.num_steps == 1


def test_a_round_takes_its_passes_and_minibatches_over_what_was_chosen():
    trainer = rejection(answers(SCORES), num_epochs=3, num_minibatches=2, min_score=3.0)
    trainer.step(FEW)
    assert trainer.roles.actor.engine.training.num_steps == 6
    strict = rejection(answers(SCORES), min_score=5.5)
    assert strict.step(FEW).compute()["rejection/kept"] == 0


def test_samples_at_another_temperature_are_learned_from_at_temperature_one():
    trainer = rejection(answers(SCORES), sampling=SamplingConfig(max_new_tokens=10, num_samples=4, temperature=1.5))
    twin = copy.deepcopy(trainer.roles.actor.engine.model)
    metrics = trainer.step(FEW).compute()
    rollout = trainer.sampler.last_rollout
    loss = -torch.cat([plain_logprobs(twin, rollout, i) for i in (2, 5)]).mean()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)  # the policy is its start, whatever the sampler's temperature


@pytest.mark.parametrize(("make", "rate"), [(online, 1e-2), (rejection, 2e-2)])
def test_the_method_learns_to_say_a_rewarded_token(make, rate):
    trainer = make(count_of(42), rate=rate)
    scores = [trainer.step(PROMPTS).compute()["reward"] for _ in range(25)]
    assert sum(scores[-5:]) / 5 > 10 * max(sum(scores[:5]) / 5, 0.1), scores


@pytest.mark.parametrize(("make", "message"), [
    (lambda: OnlineConfig(SamplingConfig(num_samples=1)), r"num_samples is 1; a pair is made of two"),
    (lambda: OnlineConfig(SamplingConfig(num_samples=2, temperature=0)), "greedy responses to one prompt"),
    (lambda: OnlineConfig(SamplingConfig(num_samples=2, top_k=1)), "online.sampling.top_k is 1: greedy .* take 0"),
    (lambda: PPOConfig(SamplingConfig(num_samples=2, temperature=0), estimator="grpo"),
     "ppo.sampling.temperature is 0: greedy .* take 1"),
    (lambda: PPOConfig(SamplingConfig(num_samples=2, top_k=1), estimator="rloo"), "ppo.sampling.top_k is 1: greedy"),
    (lambda: RejectionConfig(SamplingConfig(num_samples=1)), "of one response none is the best"),
    (lambda: RejectionConfig(num_epochs=0), "rejection.num_epochs is 0"),
    (lambda: RejectionConfig(missing_eos_penalty=-1), "must not be negative")])
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()
