"""Policy losses beyond PPO's, aggregation, KL in the loss, importance weights and the overlong penalty, by hand."""

import math

import pytest
import torch

from hybrid_rlhf.algorithms.kl import kl_estimate, kl_loss
from hybrid_rlhf.algorithms.policy import denominators, importance_weights, policy_loss, sequences_within
from hybrid_rlhf.algorithms.shaping import overlong

OWNER = torch.tensor([0, 0, 1])  # a response of two actions and one of one
LOGS = torch.tensor([math.log(1.5), math.log(0.9), math.log(0.5)])  # log-ratios of the three


def loss_of(kind, advantages, denominator=1.0, cliprange=(0.2, 0.2), weights=None, new=LOGS):
    new = new.clone().requires_grad_()
    loss, seen = policy_loss(new, torch.zeros(3), torch.tensor(advantages), cliprange=cliprange, kind=kind,
                             owner=OWNER, denominator=denominator, weights=weights)
    loss.backward()
    return float(loss.detach()), new.grad, {name: float(mean) for name, (mean, _) in seen.items()}


def test_gspo_has_one_ratio_per_response_the_geometric_mean():
    both = (1.5 * 0.9) ** 0.5  # 1.162
    loss, gradient, seen = loss_of("gspo", [1.0, 1.0, 2.0])
    assert loss == pytest.approx(-2 * both - 2 * 0.5, rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([-both, -both, -1.0]))  # d(2 both)/d log = both: half from each
    assert seen["policy/ratio"] == pytest.approx((2 * both + 0.5) / 3, rel=1e-6)
    clipped, gradient, seen = loss_of("gspo", [1.0, 1.0, -2.0], cliprange=(0.2, 0.1))
    assert clipped == pytest.approx(-2 * 1.1 + 2 * 0.8, rel=1e-6)
    assert not gradient.any() and seen["policy/clip_fraction"] == 1.0


def test_a_ratio_of_responses_needs_to_know_whose_each_action_is():
    for kind in ("gspo", "ppo_sequence"):
        with pytest.raises(ValueError, match="need owner"):
            policy_loss(LOGS, torch.zeros(3), torch.ones(3), cliprange=(0.2, 0.2), denominator=3.0, kind=kind)


def test_ppo_sequence_has_the_product():
    loss, gradient, _ = loss_of("ppo_sequence", [-1.0, -1.0, 0.0], denominators(
        "sequence", OWNER, num_actions=3, num_sequences=2, length=9))
    assert loss == pytest.approx(1.35 / 2, rel=1e-6)  # the mean over two responses
    torch.testing.assert_close(gradient, torch.tensor([1.35 / 2, 1.35 / 2, 0.0]))


def test_cispo_keeps_the_gradient_of_every_action_times_a_capped_ratio():
    loss, gradient, seen = loss_of("cispo", [1.0, -1.0, -3.0], cliprange=(0.2, 0.3))
    ratios = [1.3, 0.9, 0.5]  # the first is capped; the last is below 0.8 and is not
    assert loss == pytest.approx(sum(-r * a * x for r, a, x in zip(ratios, [1, -1, -3], LOGS.tolist(), strict=True)),
                                 rel=1e-6)
    torch.testing.assert_close(gradient, torch.tensor([-1.3, 0.9, 1.5]))
    assert seen["clip_ratio/low_mean"] == 0 and seen["clip_ratio/high_mean"] == pytest.approx(1 / 3)


def test_the_three_aggregations_of_the_same_losses():
    # ratio 1 and A 1, 2, 6: losses -1, -2 | -6
    for name, expected in (("token", -9 / 3), ("sequence", (-1.5 - 6) / 2), ("constant", -9 / (2 * 8))):
        share = denominators(name, OWNER, num_actions=3, num_sequences=2, length=8)
        assert loss_of("ppo", [1.0, 2.0, 6.0], share, new=torch.zeros(3))[0] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="token, sequence, constant"):
        denominators("mean", OWNER, num_actions=3, num_sequences=2, length=8)


def test_asymmetric_clip_has_two_bounds():
    assert loss_of("ppo", [1.0, 0.0, -1.0], cliprange=(0.3, 0.4))[0] == pytest.approx(-1.4 + 0.7, rel=1e-6)


def test_importance_weights_are_capped_per_action_or_per_response_and_weigh_the_loss():
    old, sampled = torch.tensor([math.log(3.0), math.log(0.5), math.log(0.25)]), torch.zeros(3)
    torch.testing.assert_close(importance_weights(old, sampled, OWNER, level="token", cap=2.0),
                               torch.tensor([2.0, 0.5, 0.25]))
    weights = importance_weights(old, sampled, OWNER, level="sequence", cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.5, 1.5, 0.25]))
    rare = importance_weights(torch.tensor([-1.0, 399.0, -401.0]), -torch.ones(3), OWNER, level="token", cap=math.inf)
    torch.testing.assert_close(rare.log(), torch.tensor([0.0, 20.0, -20.0]))  # log-ratios within +-20
    assert loss_of("ppo", [1.0, 2.0, 6.0], weights=weights, new=torch.zeros(3))[0] == pytest.approx(-1.5 - 3 - 1.5)


def test_the_literal_vectors_of_the_kl_and_its_place_in_the_loss():
    logp, ref = torch.tensor([[.5, .2, .1], [.6, .2, .1]]), torch.tensor([[.4, .3, 0], [.7, .1, .3]])
    torch.testing.assert_close(kl_estimate(logp, ref), torch.tensor([[.1, -.1, .1], [-.1, .1, -.2]]))
    new = logp[0].clone().requires_grad_()
    term = kl_loss(new, ref[0], "k3", 3.0)
    d = [0.1, -0.1, 0.1]
    assert float(term.detach()) == pytest.approx(sum(math.exp(-x) - 1 + x for x in d) / 3, rel=1e-5)
    term.backward()
    torch.testing.assert_close(new.grad, torch.tensor([(1 - math.exp(-x)) / 3 for x in d]))


def test_the_overlong_penalty_falls_from_the_buffer_s_start_to_minus_1():
    lengths = torch.tensor([1, 6, 7, 8, 10])
    torch.testing.assert_close(overlong(lengths, 10, 4), torch.tensor([0.0, 0.0, -0.25, -0.5, -1.0]))
    assert overlong(torch.tensor([12]), 10, 4).tolist() == [-1.0]
    assert overlong(torch.tensor([9, 10]), 10, 1).tolist() == [0.0, -1.0]
    assert overlong(torch.tensor([0, 5]), 10, 10).tolist() == [0.0, -0.5]
    for buffer in (0, 11):
        with pytest.raises(ValueError, match=r"\[1, 10\]"):
            overlong(lengths, 10, buffer)


def test_a_micro_batch_without_actions_has_loss_zero():
    empty = torch.zeros(0)
    for kind in ("ppo", "gspo", "ppo_sequence", "cispo"):
        loss, _ = policy_loss(empty, empty, empty, cliprange=(0.2, 0.2), kind=kind, owner=empty.long(), denominator=(
            denominators("sequence", empty.long(), num_actions=5, num_sequences=2, length=8)))
        assert float(loss) == 0


def test_sequences_within_a_band_of_the_geometric_mean_stay():
    """Gaps of 0.1 and 0.3 have the mean 0.2; a row without actions has nothing to disagree on."""
    old, sampled = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -2.3, -0.3])
    owner = torch.tensor([0, 0, 2])
    for low, high, expected in ((0.8, 1.23, [True, True, True]), (0.8, 1.22, [False, True, True]),
                                (0.82, 1.23, [True, True, False])):  # e^0.2 = 1.2214, e^-0.2 = 0.8187
        assert sequences_within(old, sampled, owner, low=low, high=high, num_rows=3).tolist() == expected


def test_a_band_counts_its_ends_and_every_row_that_there_is():
    logs, owner = torch.tensor([-1.0, -2.0]), torch.tensor([0, 1])
    assert sequences_within(logs, logs, owner, low=1.0, high=1.0).tolist() == [True, True]
    old = torch.tensor([-1.0, -1.0])
    assert sequences_within(old, logs, owner, low=0.9, high=1.1, num_rows=4).tolist() == [True, False, True, True]
