"""KL estimates and their price, by hand; the estimators against the exact divergence of two distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.algorithms.kl import AdaptiveKL, FixedKL, UpdateRate, kl_estimate
from hybrid_rlhf.algorithms.shaping import missing_eos, normalise, shape_rewards
from hybrid_rlhf.core.tensors import length_mask


def test_the_three_estimators_by_hand():
    # D = log 2 and -log 2: k1 = D; k2 = D^2/2; k3 = exp(-D) - 1 + D = 1/2 - 1 + log 2 and 2 - 1 - log 2
    d = math.log(2)
    logprobs, ref = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.0 - d, -2.0 + d]])
    for name, expected in {"k1": [d, -d], "k2": [d * d / 2] * 2, "k3": [d - 0.5, 1 - d]}.items():
        torch.testing.assert_close(kl_estimate(logprobs, ref, name), torch.tensor([expected]), rtol=1e-5, atol=1e-6)


def test_k1_is_the_difference_of_log_probabilities():
    logprobs, ref = torch.tensor([[0.5, 0.2, 0.1], [0.6, 0.2, 0.1]]), torch.tensor([[0.4, 0.3, 0.0], [0.7, 0.1, 0.3]])
    expected = torch.tensor([[0.1, -0.1, 0.1], [-0.1, 0.1, -0.2]])
    torch.testing.assert_close(kl_estimate(logprobs, ref, "k1"), expected, rtol=0, atol=1e-6)


def test_k1_and_k3_have_the_exact_kl_as_expectation_and_k2_and_k3_are_never_negative():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6)
    for name in ("k1", "k3"):  # the expectation over tokens drawn from p is a sum of three terms
        assert float((p * kl_estimate(p.log(), q.log(), name)).sum()) == pytest.approx(exact, abs=1e-6)
    for name in ("k2", "k3"):
        assert (kl_estimate(p.log(), q.log(), name) >= 0).all()


def test_k3_is_bounded_where_the_policies_are_far_apart():
    far = kl_estimate(torch.tensor([-300.0, 0.0]), torch.tensor([0.0, -300.0]), "k3")
    torch.testing.assert_close(far, torch.tensor([math.exp(10) - 11, math.exp(-10) + 9]))


def test_k3_of_near_equal_policies_keeps_its_digits():
    # k3 ~ D^2/2; 1 - exp(-D) in fp32 would lose it at D = 1e-3
    assert float(kl_estimate(torch.tensor([1e-3]), torch.zeros(1), "k3")) == pytest.approx(4.99833e-7, rel=5e-3)


def test_half_precision_is_estimated_in_fp32_and_other_names_are_refused():
    assert kl_estimate(torch.zeros(2).bfloat16(), torch.zeros(2).bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"k4.*k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_a_fixed_price_stays_and_travels_through_its_state():
    price = FixedKL(0.05)
    price.update(mean_kl=100.0, num_sequences=64)
    assert price.value == 0.05
    other = FixedKL(1.0)
    other.load_state(price.state())
    assert other.value == 0.05


@pytest.mark.parametrize(("kl", "factor"), [
    (6.0, 1.0),                  # on target
    (6.6, 1 + 0.1 * 64 / 1000),  # 10% above
    (5.4, 1 - 0.1 * 64 / 1000),
    (60.0, 1 + 0.2 * 64 / 1000),  # clipped at +-20%
    (0.0, 1 - 0.2 * 64 / 1000),
])
def test_an_adaptive_price_follows_the_target(kl, factor):
    price = AdaptiveKL(0.2, target=6.0, horizon=1000)
    price.update(kl, num_sequences=64)
    assert price.value == pytest.approx(0.2 * factor, rel=1e-9)


def test_an_adaptive_price_continues_from_its_state():
    one, two = AdaptiveKL(0.2, 6.0, 1000), AdaptiveKL(0.9, 6.0, 1000)
    one.update(60.0, 500)
    two.load_state(one.state())
    for price in (one, two):
        price.update(60.0, 500)
    assert one.value == two.value == pytest.approx(0.2 * 1.1 * 1.1)


def test_an_adaptive_price_refuses_what_would_break_it_silently():
    price = AdaptiveKL(0.2, target=6.0, horizon=10)
    with pytest.raises(ValueError, match="nan"):
        price.update(math.nan, 1)
    with pytest.raises(ValueError, match="horizon 10"):
        price.update(0.0, 51)  # 1 - 0.2 * 5.1 < 0: paid for drifting away
    with pytest.raises(ValueError, match="horizon 10"):
        price.update(0.0, 50)  # exactly 0: no price would ever come back
    assert price.value == 0.2
    for target, horizon in ((0.0, 10), (6.0, 0)):
        with pytest.raises(ValueError, match="positive"):
            AdaptiveKL(0.2, target, horizon)


def test_a_small_target_and_a_horizon_of_one_sequence_are_an_adaptive_price_too():
    price = AdaptiveKL(0.2, target=0.5, horizon=1)
    price.update(0.55, num_sequences=1)
    assert price.value == pytest.approx(0.2 * 1.1)


def test_the_rate_of_updates_starts_at_1_and_moves_by_the_root_of_target_over_kl():
    rate, found = UpdateRate(0.01), []
    assert rate.value == 1.0
    for kl in (0.04, 0.0064, 0.0, 9.0, math.nan, 1e-20):
        rate.update(kl)
        found.append(rate.value)
    # x 1/2; x 5/4; at most x 3/2; at least x 1/10; what is no number was too far; x 3/2
    assert found == pytest.approx([0.5, 0.625, 0.9375, 0.09375, 0.009375, 0.0140625])
    other = UpdateRate(0.01)
    other.load_state(rate.state())
    assert other.value == rate.value
    for _ in range(20):
        rate.update(0.0)
    assert rate.value == 1.0


def test_without_a_target_the_rate_of_updates_stays():
    rate = UpdateRate(None)
    rate.update(100.0)
    assert rate.value == 1.0
    rate.load_state({"value": 0.25})  # of a run with a target, from which one without goes on
    assert rate.value == 1.0


# --- Scores become rewards, by hand

def test_every_action_pays_its_kl_and_the_last_one_earns_the_score():
    mask = length_mask([3, 1], 4)
    kl = torch.tensor([[0.5, -1.0, 2.0, math.nan], [4.0, 7.0, 7.0, 7.0]])
    rewards = shape_rewards(torch.tensor([1.0, -2.0]), kl, 0.1, mask)
    # -0.1 * 0.5, -0.1 * -1, 1 - 0.1 * 2, nothing; -2 - 0.1 * 4, nothing
    expected = torch.tensor([[-0.05, 0.1, 0.8, 0.0], [-2.4, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_a_row_without_actions_is_paid_nothing():
    rewards = shape_rewards(torch.tensor([3.0]), torch.ones(1, 2), 0.1, torch.zeros(1, 2, dtype=torch.bool))
    assert rewards.tolist() == [[0.0, 0.0]]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4), extra=st.integers(1, 3), seed=st.integers(0, 999))
def test_more_padding_changes_no_reward_and_a_row_is_paid_score_less_kl(lengths, extra, seed):
    generator = torch.Generator().manual_seed(seed)
    mask, wide = length_mask(lengths, 5), length_mask(lengths, 5 + extra)
    scores, kl = torch.randn(len(lengths), generator=generator), torch.randn(*mask.shape, generator=generator)
    rewards = shape_rewards(scores, kl, 0.3, mask)
    filled = torch.cat([kl.masked_fill(~mask, 9.0), torch.full((len(lengths), extra), math.nan)], 1)
    padded = shape_rewards(scores, filled, 0.3, wide)
    torch.testing.assert_close(padded[:, :5], rewards, rtol=0, atol=0)
    assert not padded[:, 5:].any()
    paid = [float(scores[i]) - 0.3 * sum(kl[i, :n].tolist()) for i, n in enumerate(lengths)]
    torch.testing.assert_close(padded.sum(1), torch.tensor(paid), rtol=1e-4, atol=1e-5)


def test_scores_are_put_on_the_scale_of_stage_two():
    torch.testing.assert_close(normalise(torch.tensor([1.0, 4.0]), mean=2.0, std=0.5), torch.tensor([-2.0, 4.0]))
    for std in (0.0, math.nan):
        with pytest.raises(ValueError, match="standard deviation"):
            normalise(torch.ones(1), 0.0, std)


def test_only_responses_that_did_not_end_pay_the_penalty():
    paid = missing_eos(torch.tensor([1.0, 1.0]), torch.tensor([True, False]), penalty=0.75)
    assert paid.tolist() == [1.0, 0.25]


def test_a_part_of_the_score_stands_at_an_action_of_its_own_and_the_rest_at_the_last():
    mask = length_mask([3, 2], 4)
    placed = torch.tensor([[0.5, 0.0, 0.25, math.nan], [0.0, -1.0, 9.0, 9.0]]).double()
    rewards = shape_rewards(torch.tensor([2.0, 1.0]), torch.ones(2, 4), 0.1, mask, placed)
    # 0.5 - 0.1, -0.1, 0.25 + (2 - 0.75) - 0.1; -0.1, -1 + (1 + 1) - 0.1: a row's sum is its score less its KL
    torch.testing.assert_close(rewards, torch.tensor([[0.4, -0.1, 1.4, 0.0], [-0.1, 0.9, 0.0, 0.0]]))
