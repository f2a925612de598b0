"""Scores become rewards, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.algorithms.shaping import missing_eos, normalise, shape_rewards
from hybrid_rlhf.core.tensors import length_mask


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
