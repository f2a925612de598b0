"""Truncated sampling replayed: what training says of the samples is what the sampler drew them by, and no number of
steps that cut nothing off changes."""

from __future__ import annotations

import copy

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.roles import Actor, PolicyModule, Reference, Roles
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.collect import collect
from hybrid_rlhf.trainers.ppo import PPOTrainer
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer
from tests.factories.trainers import CLOCKED, PROMPTS, Source, count_of, online, settings, trained, varied_if, weights
from tests.factories.warpers import warped_by_model

CUT = SamplingConfig(max_new_tokens=10, num_samples=4, top_p=0.8, temperature=0.9)
LENGTH = Source(lambda rollout: rollout.action_mask.sum(1).float())


def roles_of(wide: float = 6.0) -> Roles:
    """An actor and another model as its reference; wide: of the heads' weights, so that words are unlike likely."""
    actor, reference = (tiny_causal_lm(seed, initializer_range=0.2) for seed in (3, 4))
    for model in (actor, reference):
        model.lm_head.weight.data *= wide
    return Roles(Actor(trained(HybridEngine(PolicyModule(actor), actor, eos_ids=[3], pad_id=0), 1e-2),
                       tiny_tokenizer(), 60),
                 Reference(HybridEngine(PolicyModule(reference), reference, eos_ids=[3], pad_id=0)))


def truth(model, rollout: Rollout) -> torch.Tensor:
    """(N,) log-probabilities of the actions by the plain forward, among what transformers leaves of its logits."""
    found = []
    for prompt, ids, mask in zip(rollout.prompts.ids, rollout.response_ids, rollout.action_mask, strict=True):
        tokens = ids[mask].tolist()
        left = warped_by_model(model, prompt, tokens, top_p=CUT.top_p, temperature=CUT.temperature)
        found.append(left.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(found)


def collected(keeps: bool, sampling: SamplingConfig = CUT) -> tuple[Rollout, Roles]:
    roles = roles_of()
    return collect(PROMPTS, roles, LENGTH, sampling, 3, Metrics(), keep_candidates=keeps), roles


def test_without_replay_the_ratio_is_about_nine_tenths_and_with_it_one():
    """By a sampler that tells the truth: the mass of what top_p 0.8 keeps, on average, against 1."""
    kept, roles = collected(True)
    plain, _ = collected(False)
    assert torch.equal(kept.response_ids, plain.response_ids) and plain.kept is None
    sampled = truth(roles.actor.engine.model, plain)  # of the draws, worked out by transformers
    without = (plain.of_actions(plain.logprobs) - sampled).exp()
    assert 0.87 < float(without.mean()) < 0.96 and float(without.min()) > 0.8 - 1e-5
    ratio = (kept.of_actions(kept.logprobs) - sampled).exp()
    assert float(ratio.mean()) == pytest.approx(1, abs=1e-6)
    assert float((ratio - 1).abs().max()) < 5e-5  # logits of tens, in fp32, by two orders of the same sums
    assert float((kept.of_actions(kept.sampled_logprobs) - sampled).abs().max()) < 5e-5


def test_the_reference_speaks_of_the_actor_s_words():
    """KL(actor || reference) of the truncated policy: the reference among the words that the actor kept."""
    rollout, roles = collected(True)
    expected = []
    for i, (prompt, mask) in enumerate(zip(rollout.prompts.ids, rollout.action_mask, strict=True)):
        tokens = rollout.response_ids[i][mask].tolist()
        actor = warped_by_model(roles.actor.engine.model, prompt, tokens, top_p=0.8, temperature=0.9)
        reference = warped_by_model(roles.ref.engine.model, prompt, tokens, temperature=0.9)
        among = reference.masked_fill(actor.isinf(), float("-inf")).log_softmax(-1)
        expected.append(among.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    assert torch.allclose(rollout.of_actions(rollout.ref_logprobs), torch.cat(expected), atol=5e-5)


def test_chosen_and_joined_sequences_keep_their_words():
    rollout, roles = collected(True)
    three = SamplingConfig(max_new_tokens=4, top_k=3, temperature=0.9)
    other = collect(PROMPTS.rows([8, 1]), roles, LENGTH, three, 4, Metrics(), keep_candidates=True)
    both = (rollout.rows(torch.tensor([7, 2, 2])) + other).rows(torch.tensor([4, 1, 0, 3]))
    assert torch.allclose(roles.actor.logprobs(both), both.logprobs, atol=5e-5)
    assert [len(sizes) for sizes in both.kept.sizes] == both.action_mask.sum(1).tolist()
    assert set(torch.cat([both.kept.sizes[0], both.kept.sizes[3]]).tolist()) == {3}


@pytest.mark.parametrize("changes", [{"estimator": "grpo"}, {"estimator": "grpo", "policy_loss": "gspo"},
                                     {"estimator": "rloo", "old_logprobs": "recompute", "entropy_coef": 0.1}],
                         ids=lambda c: "-".join(map(str, c.values())))
def test_a_step_starts_from_ratio_one_whatever_the_token_budget(changes):
    outcomes = []
    for max_tokens in (14, 8192):
        trainer = online(settings(sampling=CUT, **changes), count_of(42), max_tokens, 1e-3)
        outcomes.append(trainer.step(PROMPTS).compute())
        kept = trainer.last_rollout.kept
        assert outcomes[-1]["engine/kept_bytes"] == 4 * sum(map(len, kept.ids)) + 8 * sum(map(len, kept.sizes))
        assert outcomes[-1]["policy/ratio"] == pytest.approx(1, abs=1e-5)
        assert outcomes[-1]["engine/logprob_drift"] < 1e-5
    for name, value in outcomes[0].items():
        if not name.startswith(CLOCKED) and not name.endswith("micro_batch_tokens"):
            assert outcomes[1][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_entropy_is_that_of_the_words_kept():
    """Of k words equally likely it is log k; the tiny model's are nearly so, and of 300 it would be 5.7."""
    trainer = online(settings(sampling=SamplingConfig(max_new_tokens=6, num_samples=2, top_k=5), estimator="grpo"),
                     count_of(42))
    assert trainer.step(PROMPTS).compute()["entropy"] == pytest.approx(1.609, abs=0.01)


def test_the_option_leaves_it_as_it_was():
    trainer = online(settings(sampling=CUT, estimator="grpo", replay_truncation=False), count_of(42))
    metrics = trainer.step(PROMPTS).compute()
    assert trainer.last_rollout.kept is None and "engine/kept_bytes" not in metrics
    assert metrics["entropy"] > 5.5  # of all words


def test_refills_and_minibatches_keep_their_words_and_a_resumed_run_goes_on_alike():
    def trainer() -> PPOTrainer:
        texts = iter(["y", "x", "y", "y", "x", "y"] * 3)
        prompts = lambda: Prompts([[9, 10], [11]], [next(texts), next(texts)], {"n": [0, 1]})  # noqa: E731
        return online(settings(sampling=CUT, estimator="grpo", num_minibatches=3, num_ppo_epochs=2, max_refills=2),
                      varied_if(lambda text: text == "y"), extra_prompts=prompts)

    first = trainer()
    asked = Prompts([[5, 6, 7], [8, 9], [10, 11]], ["x", "y", "x"], {"n": [0, 1, 2]})
    first.step(asked)
    rollout = first.last_rollout
    assert len(rollout) == len(rollout.kept) == 12
    assert [len(sizes) for sizes in rollout.kept.sizes] == rollout.action_mask.sum(1).tolist()
    second, outcomes = trainer(), []
    second.load_state(copy.deepcopy(first.state()))
    for one in (first, second):
        one.extra_prompts = lambda: asked
        outcomes.append({k: v for k, v in one.step(PROMPTS).compute().items() if not k.startswith(CLOCKED)})
    assert outcomes[0] == outcomes[1]
    assert all(torch.equal(a, b) for a, b in zip(weights(first.roles.actor.engine), weights(second.roles.actor.engine),
                                                 strict=True))


def test_held_out_kl_is_of_the_same_kind():
    trainer = online(settings(sampling=CUT, estimator="grpo"), count_of(42))
    for _ in range(3):
        trainer.step(PROMPTS)
    rollout = collect(PROMPTS, trainer.roles, trainer.source, CUT, 0, Metrics(), keep_candidates=True)
    assert trainer.evaluate([PROMPTS]).compute()["kl"] == pytest.approx(rollout.mean_kl(), rel=1e-6)
    whole = collect(PROMPTS, trainer.roles, trainer.source, CUT, 0, Metrics())
    assert abs(rollout.mean_kl() - whole.mean_kl()) > 1e-6


# -- masked importance sampling --------------------------------------------------------------------------------------


def masked_step(shift: list[float], **changes) -> tuple[dict, PPOTrainer]:
    """One step whose sampler says of response i what training says, less shift[i] in every token. The scores are 1, 0
    and 3, 1, so that rloo's advantages are 1, -1 and 2, -2."""
    trainer = online(settings(sampling=SamplingConfig(max_new_tokens=6, num_samples=2), estimator="rloo",
                              old_logprobs="recompute", kl_coef=0.0, **changes), count_of(42), rate=1e-2)
    generate = trainer.roles.actor.generate

    def shifted(*given):
        rollout = generate(*given)
        rollout.sampled_logprobs = rollout.sampled_logprobs - torch.tensor(shift)[:, None]
        return rollout

    trainer.roles.actor.generate = shifted
    trainer.source.score = lambda rollout: torch.tensor([1.0, 0.0, 3.0, 1.0])
    return trainer.step(Prompts([[5, 6], [7, 8]], ["", ""])).compute(), trainer


def test_responses_outside_the_band_are_left_out_and_counted():
    """Ratios of exp(0.3) and exp(-0.2), whatever the lengths, and bands [1 / 1.1, 1.1] and [0.5, 1.1]."""
    shift = [0.0, 0.3, -0.2, 0.02]
    band, none = {"importance": "masked", "importance_cap": 1.1}, [0.0] * 4
    metrics, _ = masked_step(shift, **band)
    assert metrics["policy/masked_sequences"] == 0.5 and "policy/importance" not in metrics
    assert masked_step(shift, **band, importance_low=0.5)[0]["policy/masked_sequences"] == 0.25
    (all_in, one), (plain, other) = masked_step(none, **band), masked_step(none)
    assert all_in["policy/masked_sequences"] == 0 and "policy/masked_sequences" not in plain
    assert all(torch.equal(a, b) for a, b in zip(*(weights(t.roles.actor.engine) for t in (one, other)), strict=True))
    assert masked_step([9.0] * 4, **band)[0]["grad_norm"] == 0


def test_a_response_left_out_counts_as_zero_in_the_mean():
    """At ratio 1 the loss is minus the mean of the advantages over tokens, of which the first response's are 0 now."""
    metrics, trainer = masked_step([9.0, 0.0, 0.0, 0.0], importance="masked", importance_cap=1.1)
    lengths = trainer.last_rollout.action_mask.sum(1).tolist()
    expected = -sum(a * n for a, n in zip([0, -1, 2, -2], lengths, strict=True)) / sum(lengths)
    assert metrics["policy/masked_sequences"] == 0.25
    assert metrics["policy/loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("changes, said", [
    ({"importance": "masked", "old_logprobs": "sampler"}, "choose recompute"),
    ({"importance": "masked", "importance_cap": 0.9}, r"lies in \[1.11111, 0.9\].*give ppo.importance_cap 1.05"),
    ({"importance": "masked", "importance_low": -1.0}, "ppo.importance_low is -1.0; it must be positive"),
    ({"importance": "mask"}, "did you mean masked")])
def test_settings_that_do_not_go_together_are_one_line(changes, said):
    with pytest.raises(UserError, match=said):
        settings(**changes)
