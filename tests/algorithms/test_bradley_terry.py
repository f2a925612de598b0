"""Bradley-Terry by hand."""

import math

import pytest
import torch

from hybrid_rlhf.algorithms.preference import bradley_terry


def test_the_loss_of_each_pair_by_hand():
    # s_c - s_r = 0: log 2; = 1: log(1 + 1/e); = -2: log(1 + e^2)
    losses = bradley_terry(torch.tensor([0.5, 2.0, -1.0]), torch.tensor([0.5, 1.0, 1.0]))
    torch.testing.assert_close(losses, torch.tensor([math.log(2), math.log1p(math.exp(-1)), math.log1p(math.exp(2))]))


def test_a_margin_is_what_the_difference_must_exceed():
    scores = torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0])
    # 1 - 1 = 0 and 3 - 1 = 2
    expected = torch.tensor([math.log(2), math.log1p(math.exp(-2))])
    torch.testing.assert_close(bradley_terry(*scores, margin=torch.tensor([1.0, 1.0])), expected)
    torch.testing.assert_close(bradley_terry(*scores, margin=1.0), expected)


def test_centering_adds_the_square_of_the_sum():
    # log 2 + 0.1 * (1.5 + 1.5)^2
    losses = bradley_terry(torch.tensor([1.5]), torch.tensor([1.5]), None, 0.1)
    assert float(losses) == pytest.approx(math.log(2) + 0.9)


def test_the_gradient_pulls_the_scores_apart_by_the_odds_of_being_wrong():
    chosen, rejected = torch.tensor([1.0], requires_grad=True), torch.tensor([0.0], requires_grad=True)
    bradley_terry(chosen, rejected).sum().backward()
    wrong = 1 / (1 + math.e)
    assert float(chosen.grad) == pytest.approx(-wrong) and float(rejected.grad) == pytest.approx(wrong)


def test_far_apart_scores_stay_finite_and_half_precision_is_computed_in_fp32():
    losses = bradley_terry(torch.tensor([-500.0, 500.0]).bfloat16(), torch.tensor([500.0, -500.0]).bfloat16())
    assert losses.dtype == torch.float32 and losses.tolist() == [1000.0, 0.0]


def test_shapes_that_would_broadcast_are_refused():
    for chosen, rejected, margin in ((3, 1, None), (3, 3, torch.zeros(1)), (3, 3, torch.zeros(3, 1))):
        with pytest.raises(ValueError, match="pairs need"):
            bradley_terry(torch.zeros(chosen), torch.zeros(rejected), margin)
