"""Whole gradients of every stage: any token budget, padded or alone, chunked logits or whole, against plain torch."""

import copy

import pytest
import torch

from hybrid_rlhf.core.tensors import token_budget_groups
from hybrid_rlhf.data.collate import collate_pairs, collate_sft
from hybrid_rlhf.engine import OptimizerConfig, ZeroConfig
from hybrid_rlhf.roles import Actor, Critic, Reward
from hybrid_rlhf.roles import policy_module as policy_module
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.trainers.reward import RewardTrainer
from hybrid_rlhf.trainers.sft import SFTTrainer
from tests.factories.trainers import SFT_ROWS, policy, ppo, scalar, settings

# Adam's mean of the first gradient is a tenth of it, and a rate of 0 and an endless bound leave it as it came.
STILL = OptimizerConfig(learning_rate=0.0, max_grad_norm=1e9)
BUDGETS = [1, 13, 8192]  # every row alone and unpadded, some together, all in one padded batch
PAIRS = [{"chosen_ids": [5, 6, 7, 3], "rejected_ids": [5, 6, 8, 9, 10, 3], "num_prompt_tokens": 2},
         {"chosen_ids": [11, 12, 13, 14, 3], "rejected_ids": [11, 3], "num_prompt_tokens": 1}]


def still(engine):
    return engine.prepare_training(STILL, lambda step: 1.0, ZeroConfig())


def assert_gradient(engine, twin, loss):
    """The engine's only update had the gradient of `loss` by the parameters of `twin`, all of it to 1e-5."""
    loss.backward()
    found = engine.training.state()["exp_avg"]
    expected = [p.grad for p in twin.parameters()]
    scale = max(float(g.abs().max()) for g in expected if g is not None)
    assert len(found) == len(expected) and scale > 1e-3
    for (name, mean), gradient in zip(found.items(), expected, strict=True):
        gradient = torch.zeros_like(mean) if gradient is None else gradient
        torch.testing.assert_close(10 * mean, gradient, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture
def rollout():
    """Three responses with numbers as a rollout would hold them; the old log-probabilities are the model's, moved."""
    out = Rollout.from_responses(Prompts([[5, 6], [7, 8, 9], [4]], ["a", "b", "c"]),
                                 [[10, 11, 3], [12], [13, 14, 15, 16, 17, 3]], [True, False, True], 0, [""] * 3)
    draws = torch.Generator().manual_seed(1)
    out.advantages, out.returns, out.values = (torch.randn(3, 6, generator=draws) for _ in range(3))
    out.logprobs = Actor(policy(), None).logprobs(out) + 0.3 * torch.randn(3, 6, generator=draws)
    return out


def actions(rollout):
    """(row, whole sequence, number of prompt tokens, number of actions) of each response."""
    for row, prompt in enumerate(rollout.prompts.ids):
        size = int(rollout.action_mask[row].sum())
        yield row, [*prompt, *rollout.response_ids[row, :size].tolist()], len(prompt), size


@pytest.mark.parametrize("chunk", [2, 10_000])
@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_sft(max_tokens, chunk, monkeypatch):
    monkeypatch.setattr(policy_module, "chunk_rows", lambda *_: chunk)
    engine = policy()
    twin = copy.deepcopy(engine.model)
    SFTTrainer(Actor(still(engine), None, max_tokens)).step(collate_sft(SFT_ROWS, 0))
    losses = []
    for row in SFT_ROWS:
        logprobs = twin(torch.tensor([row["input_ids"]])).logits[0].log_softmax(-1)
        losses += [-logprobs[t - 1, row["input_ids"][t]] for t in range(len(row["input_ids"])) if row["loss_mask"][t]]
    assert_gradient(engine, twin, torch.stack(losses).mean())


@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_reward(max_tokens):
    engine = scalar()
    twin = copy.deepcopy(engine.module.model)
    RewardTrainer(Reward(still(engine), max_tokens)).step(collate_pairs(PAIRS, 0))
    scores = [[twin(torch.tensor([r[k]])).logits[0, 0] for k in ("chosen_ids", "rejected_ids")] for r in PAIRS]
    assert_gradient(engine, twin, torch.stack([-torch.nn.functional.logsigmoid(c - r) for c, r in scores]).mean())


@pytest.mark.parametrize("chunk", [2, 10_000])
@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_actor(max_tokens, chunk, rollout, monkeypatch):
    monkeypatch.setattr(policy_module, "chunk_rows", lambda *_: chunk)
    engine, trainer = policy(), ppo(settings())
    twin = copy.deepcopy(engine.model)
    Actor(still(engine), None, max_tokens).update(rollout, trainer.actor_loss)
    losses, clipped = [], 0
    for row, ids, start, size in actions(rollout):
        logprobs = twin(torch.tensor([ids])).logits[0].log_softmax(-1)
        for t in range(size):
            ratio = (logprobs[start + t - 1, ids[start + t]] - rollout.logprobs[row, t]).exp()
            advantage = rollout.advantages[row, t]
            losses.append(torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)))
            clipped += bool((ratio - 1).abs() > 0.2)
    assert 0 < clipped < len(losses) == 10
    assert_gradient(engine, twin, torch.stack(losses).mean())


@pytest.mark.parametrize("max_tokens", BUDGETS)
def test_critic(max_tokens, rollout):
    engine, trainer = scalar(), ppo(settings())
    twin = copy.deepcopy(engine.module.model)
    Critic(still(engine), max_tokens).update(rollout, trainer.critic_loss)
    losses = []
    for row, ids, start, size in actions(rollout):
        values = (twin.model(torch.tensor([ids])).last_hidden_state @ twin.score.weight.T)[0, :, 0]
        for t in range(size):
            value, old, target = values[start + t - 1], rollout.values[row, t], rollout.returns[row, t]
            near = old + (value - old).clamp(-0.2, 0.2)
            losses.append(0.5 * torch.max((value - target) ** 2, (near - target) ** 2))
    assert_gradient(engine, twin, torch.stack(losses).mean())


def cut(lengths, max_tokens, *cost):
    groups = token_budget_groups(torch.tensor(lengths), max_tokens, *cost)
    return [[lengths[i] for i in group] for group in groups]


def test_rows_are_cut_by_length_within_the_budget_into_as_few_groups_as_possible():
    assert cut([3, 8, 5], 24) == [[8, 5, 3]]
    assert cut([3, 8, 5], 10) == [[8], [5, 3]]
    assert cut([9, 9, 2, 2, 2], 18) == [[9, 9], [2, 2, 2]]  # as few groups, less padding: not 9, 9 | 2, 2, 2 of 27
    assert cut([30, 4], 10) == [[30], [4]]  # a row beyond the budget stays alone
    assert cut([], 10) == []
    assert torch.equal(torch.cat(token_budget_groups(torch.tensor([2, 7, 7, 2]), 9)), torch.tensor([1, 2, 0, 3]))


def test_padding_is_weighed_against_the_price_of_a_group():
    # one group of 4 x 100; two of 2 x 100 and 2 x 20: 160 tokens less for one group more
    assert cut([100, 90, 20, 10], 400, 161) == [[100, 90, 20, 10]]
    assert cut([100, 90, 20, 10], 400, 159) == [[100, 90], [20, 10]]
    assert cut([100, 90, 20, 10], 400, 0) == [[100], [90], [20], [10]]
