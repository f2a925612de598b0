"""The critic's first update takes its values from the forward that it trains on: same numbers, one forward less."""

import copy

import pytest
import torch
from shortage import little_memory
from test_trainers import PROMPTS, count_of, ppo, scalar, settings, trained

from hybrid_rlhf import measuring, scalar_roles
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig, micro_batches
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.models.heads import ScalarModel
from hybrid_rlhf.roles import Critic
from hybrid_rlhf.rollout import Prompts, Rollout

SMOOTH = OptimizerConfig(learning_rate=1e-2, adam_epsilon=1.0)  # Adam as a smooth function of the gradient


def rollout_of():
    return Rollout.from_responses(Prompts([[5, 6], [7, 8, 9], [11] * 20], ["a", "b", "c"]),
                                  [[10, 11, 3], [12], [13] * 9], [True, False, True], 0, [""] * 3)


def step_of(monkeypatch, is_merged, *, group_tokens=None, with_memory=None):
    """One PPO step with an optimizer smooth in the gradient: its metrics, the rollout, the critic and its forwards."""
    torch.manual_seed(0)
    trainer = ppo(settings(num_ppo_epochs=2), count_of(10))
    critic = trainer.roles.critic
    critic.engine.prepare_training(SMOOTH, lambda step: 1.0, ZeroConfig())
    if group_tokens is not None:  # what a pass costs, so that uneven rows are cut into several micro-batches
        size = sum(p.numel() for p in critic.engine.module.parameters())
        monkeypatch.setitem(micro_batches._PASS_WEIGHTS, "cpu", (group_tokens - 64) * size)
        for room in (measuring, scalar_roles):  # prompts that come twice would stay together
            monkeypatch.setattr(room, "kin", lambda *_: None)
    if not is_merged:
        monkeypatch.setattr(Critic, "can_measure_in_update", lambda *_: False)
    calls = []
    critic.engine.module.register_forward_hook(lambda *_: calls.append(1))
    if with_memory:
        with little_memory(critic.engine.module.model, *with_memory):
            metrics = trainer.step(PROMPTS).compute()
    else:
        metrics = trainer.step(PROMPTS).compute()
    monkeypatch.undo()
    return metrics, trainer.newest, critic, len(calls)


def assert_same(found, expected, *, is_split=False):
    (ours, rollout, critic, _), (theirs, other, twin, _) = found, expected
    for name in ("values", "returns", "advantages", "rewards"):
        torch.testing.assert_close(getattr(rollout, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    for a, b in zip(critic.engine.module.parameters(), twin.engine.module.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    unlike = ("time/", "memory/", "engine/tokens_per_second", *(("value/micro_batch_tokens",) if is_split else ()))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if not name.startswith(unlike):
            assert ours[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("group_tokens", [None, 0])
def test_a_step_whose_critic_is_measured_in_its_update_is_the_step_that_measures_it_first(monkeypatch, group_tokens):
    expected = step_of(monkeypatch, False, group_tokens=group_tokens)
    found = step_of(monkeypatch, True, group_tokens=group_tokens)
    assert_same(found, expected)
    assert found[3] * 3 == expected[3] * 2  # two epochs of forwards, and no third for the values
    assert found[3] == 2 if group_tokens is None else found[3] > 4


def test_the_values_are_the_plain_forward_s_and_the_gradient_is_plain_autograd_s():
    critic, rollout, seen = Critic(trained(scalar(2))), rollout_of(), []
    twin = copy.deepcopy(critic.engine.module.model)

    def ready(values):
        rollout.values, rollout.returns = values, values + rollout.action_mask * torch.arange(1.0, 10.0)

    def loss(new, rows, count):
        seen.append(new.detach())
        return 0.5 * (new - rows.returns[rows.action_mask]).square().sum() / count, {}

    metrics = critic.first_update(rollout, ready, loss, Metrics()).compute()
    expected, total = [], 0.0
    for prompt, response in zip(rollout.prompts.ids, ([10, 11, 3], [12], [13] * 9), strict=True):
        states = twin.model(torch.tensor([prompt + response])).last_hidden_state[0] @ twin.score.weight[0]
        new = states[len(prompt) - 1 : -1]
        expected.append(new.detach())
        total = total + (0.5 * (new - new.detach() - torch.arange(1.0, len(new) + 1)) ** 2).sum() / 13
    total.backward()
    for row, (values, length) in enumerate(zip(expected, (3, 1, 9), strict=True)):
        torch.testing.assert_close(rollout.values[row, :length], values, rtol=1e-5, atol=1e-5)
    assert not rollout.values[~rollout.action_mask].any() and sum(len(s) for s in seen) == 13
    norm = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]).norm()
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_first_update_that_runs_out_of_memory_starts_again_from_the_same_values(monkeypatch, where):
    expected = step_of(monkeypatch, True)
    found = step_of(monkeypatch, True, with_memory=(where, lambda tokens: tokens > 60))
    assert found[2].engine.learnt["update"] < 100
    assert_same(found, expected, is_split=True)


def test_it_is_not_done_where_it_would_not_hold(monkeypatch):
    rollout = rollout_of()  # rows of 5, 4 and 29 tokens
    assert Critic(trained(scalar(2)), max_tokens=39).can_measure_in_update(rollout)  # 29 and 2 x 5 at once
    assert not Critic(trained(scalar(2)), max_tokens=38).can_measure_in_update(rollout)
    sharded = HybridEngine(ScalarModel(scalar(2).module.model), pad_id=0)
    sharded.prepare_training(SMOOTH, lambda step: 1.0, ZeroConfig(1))
    assert not Critic(sharded).can_measure_in_update(rollout)
    trainer = ppo(settings(num_minibatches=2))
    monkeypatch.setattr(Critic, "first_update", lambda *_: pytest.fail("of two minibatches"))
    trainer.step(PROMPTS)
    assert trainer.roles.critic.engine.training.num_steps == 2
