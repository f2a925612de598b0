"""A response with tool tokens between two sampled stretches: what the policy did not sample is context and no action.

Hand-computed numbers, plain transformers one row at a time, and the same response without its hole.
"""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.algorithms.advantages import ESTIMATORS, whiten
from hybrid_rlhf.algorithms.shaping import shape_rewards
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.rewards.functions import inputs
from hybrid_rlhf.roles import Actor, Critic
from hybrid_rlhf.roles.policy_module import PolicyModule
from hybrid_rlhf.rollout import Prompts, Rollout
from tests.factories.tiny import tiny_causal_lm, tiny_scalar_model

# two turns with a tool's three tokens between them; one turn; a tool's answer last, and nothing sampled after it
PROMPTS = [[5, 6], [5, 6], [7, 8, 9]]
RESPONSES = [[10, 11, 40, 41, 42, 12, 3], [13, 3], [14, 3, 43]]
SAMPLED = [[True, True, False, False, False, True, True], [True, True], [True, True, False]]
SEQUENCES = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
ACTIONS = [[2, 3, 7, 8], [2, 3], [3, 4]]  # places of the sampled tokens in the sequences


def rollout() -> Rollout:
    prompts = Prompts([list(p) for p in PROMPTS], ["a", "a", "b"])
    made = Rollout.from_responses(prompts, RESPONSES, [True, True, False], 0, ["x", "y", "z"], SAMPLED)
    made.scores = torch.tensor([1.0, 2.0, 3.0])
    return made


def test_sequences_hold_every_token_and_mark_the_sampled_ones():
    batch = rollout().sequences(pad_id=0)
    for i, (ids, places) in enumerate(zip(SEQUENCES, ACTIONS, strict=True)):
        assert batch.input_ids[i, : len(ids)].tolist() == ids and int(batch.attention_mask[i].sum()) == len(ids)
        assert batch.loss_mask[i].nonzero()[:, 0].tolist() == places
    again = (rollout().rows(torch.tensor([2, 0])) + rollout().rows(torch.tensor([1]))).sequences(pad_id=0)
    assert [row.nonzero()[:, 0].tolist() for row in again.loss_mask] == [ACTIONS[2], ACTIONS[0], ACTIONS[1]]


def plain_logprobs(model) -> list[torch.Tensor]:  # noqa: ANN001
    """Of the sampled tokens, one sequence at a time, by transformers' own forward."""
    found = []
    for ids, places in zip(SEQUENCES, ACTIONS, strict=True):
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        found.append(torch.stack([logprobs[t - 1, ids[t]] for t in places]))
    return found


@pytest.mark.parametrize("shares", [True, False])
def test_the_actor_scores_and_learns_the_sampled_tokens_only(shares):
    model, twin = (tiny_causal_lm(3, initializer_range=0.2) for _ in range(2))
    module = PolicyModule(model)
    module._can_share = None if shares else False
    actor = Actor(HybridEngine(module, model, pad_id=0).prepare_training(
        OptimizerConfig(learning_rate=1e-2, optim="sgd", max_grad_norm=1e9), lambda step: 1.0, ZeroConfig()), None)
    made, plain = rollout(), plain_logprobs(twin)
    scored = actor.logprobs(made)
    torch.testing.assert_close(scored[made.action_mask], torch.cat(plain), rtol=1e-4, atol=1e-5)
    assert (scored[~made.action_mask] == 0).all()
    actor.update(made, lambda scores, rows, totals: (-scores.logprobs.sum() / totals.num_actions, {}))
    (-torch.cat(plain).sum() / 8).backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - 1e-2 * theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_critic_values_the_states_before_sampled_tokens():
    model, twin = (tiny_scalar_model(3, initializer_range=0.2) for _ in range(2))
    made = rollout()
    values = Critic(HybridEngine(ScalarModel(model), pad_id=0)).values(made)
    for i, (ids, places) in enumerate(zip(SEQUENCES, ACTIONS, strict=True)):
        hidden = twin.model(torch.tensor([ids])).last_hidden_state[0]
        expected = twin.score(hidden)[:, 0][[t - 1 for t in places]]
        torch.testing.assert_close(values[i][made.action_mask[i]], expected, rtol=1e-4, atol=1e-5)


def test_the_score_is_paid_at_the_last_sampled_token_and_gae_steps_over_the_tool():
    """By hand: gamma 1, lambda 0.5, scores at the last action, no KL; values 1 at every action, 99 in the holes."""
    made = rollout()
    rewards = shape_rewards(made.scores, torch.full(made.action_mask.shape, 7.0), 0.0, made.action_mask)
    assert rewards[0].tolist() == [0, 0, 0, 0, 0, 0, 1] and rewards[2].tolist() == [0, 3, 0, 0, 0, 0, 0]
    values = torch.full(made.action_mask.shape, 99.0).masked_fill(made.action_mask, 1.0)
    advantages, returns = ESTIMATORS["gae"].fn(rewards, made.action_mask, values=values, gamma=1.0, lam=0.5)
    assert advantages[0].tolist() == [0, 0, 0, 0, 0, 0, 0]  # 1 + 0 - 1 at the end, then 0 + 1 - 1
    assert advantages[2].tolist() == [1.0, 2.0, 0, 0, 0, 0, 0]  # 3 - 1 = 2, then 0 + 1 - 1 + 0.5 * 2
    assert returns[2].tolist() == [2.0, 3.0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_says_of_the_actions_what_it_says_without_the_holes(name):
    made, draw = rollout().rows(torch.tensor([0, 1])), torch.Generator().manual_seed(0)
    mask = made.action_mask
    rewards, values = (torch.randn(mask.shape, generator=draw) for _ in range(2))
    short = torch.tensor([[True] * 4, [True, True, False, False]])
    dense = [torch.zeros(short.shape).masked_scatter(short, x[mask]) for x in (rewards, values)]
    given = {"gamma": 0.9, "lam": 0.8, "group_size": 2}
    with_holes = ESTIMATORS[name].fn(rewards, mask, values=values, **given)
    without = ESTIMATORS[name].fn(dense[0], short, values=dense[1], **given)
    for mine, plain in zip(with_holes, without, strict=True):
        torch.testing.assert_close(mine[mask], plain[short])
        assert (mine[~mask] == 0).all()
    torch.testing.assert_close(whiten(with_holes[0], mask)[mask], whiten(without[0], short)[short])


def test_lengths_and_pairs_are_those_of_sampled_tokens_and_functions_are_given_every_token():
    made = rollout()
    found = made.metrics().compute()
    assert found["completions/mean_length"] == pytest.approx((4 + 2 + 2) / 3)
    assert found["completions/distinct_2"] == 1.0  # 10 11, 12 3, 13 3, 14 3: no pair across the tool's tokens
    assert inputs(made)["completion_ids"] == RESPONSES
    made.logprobs = torch.where(made.action_mask, 1.0, 50.0)
    made.ref_logprobs = torch.zeros(made.action_mask.shape)
    assert made.mean_kl() == pytest.approx(8 / 3)
