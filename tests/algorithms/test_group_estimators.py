"""Estimators without a critic, by hand: groups of two and more, and what they do with lengths and padding."""

import math

import pytest
import torch

from hybrid_rlhf.algorithms.advantages import ESTIMATORS
from hybrid_rlhf.core.tensors import length_mask

NAN = math.nan
MASK = length_mask([2, 1, 3, 3])
# Totals 1, 3 | 2, 7: each row's rewards at its actions, with nonsense at padding.
REWARDS = torch.tensor([[-1.0, 2.0, NAN], [3.0, 9.0, NAN], [0.5, 0.5, 1.0], [1.0, -1.0, 7.0]])
GROUPED = [name for name, row in ESTIMATORS.items() if row.needs_group]


def advantages_of(name, rewards=REWARDS, mask=MASK, size=2):
    advantages, returns = ESTIMATORS[name].fn(rewards, mask, values=None, group_size=size)
    assert not advantages[~mask].any() and not returns[~mask].any()
    return advantages


def at_actions(*numbers):
    return torch.tensor(numbers)[:, None] * MASK


def test_rloo_subtracts_the_mean_of_the_others():
    torch.testing.assert_close(advantages_of("rloo"), at_actions(-2.0, 2.0, -5.0, 5.0))
    # one group of four, totals 1, 3, 2, 7: others' means 4, 10/3, 11/3, 2
    torch.testing.assert_close(advantages_of("rloo", size=4), at_actions(-3.0, 3 - 10 / 3, 2 - 11 / 3, 5.0))


def test_grpo_divides_by_the_deviation_over_n_minus_1_and_dr_grpo_does_not():
    # deviations from 2: -1, 1, std sqrt(2); from 4.5: -2.5, 2.5, std 2.5 sqrt(2)
    two, five = 1 / (2**0.5 + 1e-4), 2.5 / (2.5 * 2**0.5 + 1e-4)
    torch.testing.assert_close(advantages_of("grpo"), at_actions(-two, two, -five, five))
    torch.testing.assert_close(advantages_of("dr_grpo"), at_actions(-1.0, 1.0, -2.5, 2.5))


def test_reinforce_pp_whitens_the_rewards_to_come():
    # rewards to come: [1, 2], [3], [2, 1.5, 1], [7, 6, 7]; nine actions, sum 30.5
    to_come = [1.0, 2.0, 3.0, 2.0, 1.5, 1.0, 7.0, 6.0, 7.0]
    mean = sum(to_come) / 9
    deviation = (sum((x - mean) ** 2 for x in to_come) / 9) ** 0.5
    expected = torch.zeros(4, 3).masked_scatter(MASK, torch.tensor([(x - mean) / deviation for x in to_come]))
    torch.testing.assert_close(advantages_of("reinforce_pp"), expected)


def test_reinforce_pp_discounts_and_returns_what_is_to_come():
    returns = ESTIMATORS["reinforce_pp"].fn(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool),
                                            gamma=0.5)[1]
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 4.0]]))


def test_reinforce_pp_with_the_group_s_baseline_whitens_over_actions():
    # centred -1 twice, 1 once, -2.5 and 2.5 three times: mean -1/9 over nine actions
    per_action = [-1.0, -1.0, 1.0, *[-2.5] * 3, *[2.5] * 3]
    mean = -1 / 9
    deviation = (sum((x - mean) ** 2 for x in per_action) / 9) ** 0.5
    expected = torch.zeros(4, 3).masked_scatter(MASK, torch.tensor([(x - mean) / deviation for x in per_action]))
    torch.testing.assert_close(advantages_of("reinforce_pp_baseline"), expected)


def test_process_grpo_sums_the_normalised_rewards_of_a_token_s_own_step_and_later_ones():
    """Two groups. Of the first, one response has steps of two tokens and one worth 0.9 and 0, the other one of two
    worth 0.3: mean 0.4, deviations 0.5, -0.4, -0.1, spread sqrt((.25 + .16 + .01) / 2). The step of 0 counts. Of the
    second, the rewards between ends (a KL penalty, say) are their step's: 1 - 0.5 | 2 and 1.5, no end said but the
    last: mean 4 / 3."""
    mask = torch.tensor([[True, True, True], [True, True, False], [True, False, True], [True, True, True]])
    rewards = torch.tensor([[0, 0.9, 0], [0, 0.3, NAN], [-0.5, NAN, 1.0], [2.0, 1.5, 0]])
    ends = torch.tensor([[0, 1, 1], [0, 1, 1], [0, 1, 0], [1, 0, 0]]).bool()
    advantages, returns = ESTIMATORS["process_grpo"].fn(rewards, mask, group_size=2, step_ends=ends)
    first = (0.42 / 2) ** 0.5 + 1e-4
    deviations = [0.5 - 4 / 3, 2 - 4 / 3, 1.5 - 4 / 3]
    second = (sum(d * d for d in deviations) / 2) ** 0.5 + 1e-4
    a, b, c = (d / second for d in deviations)
    torch.testing.assert_close(advantages, torch.tensor([[0.1 / first, 0.1 / first, -0.4 / first],
                                                         [-0.1 / first, -0.1 / first, 0], [a, 0, a], [b + c, c, c]]))
    torch.testing.assert_close(returns, torch.tensor([[0.9, 0.9, 0], [0.3, 0.3, 0], [0.5, 0, 1.0], [3.5, 1.5, 0]]))


def test_process_grpo_of_scores_of_whole_responses_is_grpo():
    for size in (2, 4):
        torch.testing.assert_close(advantages_of("process_grpo", size=size), advantages_of("grpo", size=size))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_who_says_that_it_sums_gives_the_tokens_of_a_response_one_advantage_and_the_others_do_not(name):
    """Rows of two steps worth 1 and 0, and 0 and 1: the same sum."""
    rewards, ends = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool)
    advantages, _ = ESTIMATORS[name].fn(rewards, ends, values=torch.zeros(2, 2), group_size=2, step_ends=ends)
    assert bool((advantages[0] == advantages[1]).all()) == ESTIMATORS[name].sums


@pytest.mark.parametrize("name", GROUPED)
def test_equal_scores_teach_nothing_and_groups_of_one_or_torn_groups_are_refused(name):
    assert not advantages_of(name, rewards=torch.zeros(4, 3)).any()
    for size in (1, 3):
        with pytest.raises(ValueError, match="whole groups"):
            advantages_of(name, size=size)


def test_only_gae_needs_a_critic():
    assert [name for name, row in ESTIMATORS.items() if row.needs_values] == ["gae"]
    assert GROUPED == ["reinforce_pp_baseline", "rloo", "grpo", "process_grpo", "dr_grpo"]


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_is_one_response_where_nothing_is_said_and_so_is_refused(name):
    with pytest.raises(ValueError, match="4 responses in groups of 1"):
        ESTIMATORS[name].fn(REWARDS, MASK)


@pytest.mark.parametrize(("name", "advantages"), [
    # of 1, 3 and 5 the mean is 3 and the deviation 2; a lone score has nothing to be compared with
    ("grpo", [-2 / 2.0001, 0, 0, 2 / 2.0001] + [0] * 8), ("dr_grpo", [-2, 0, 0, 2] + [0] * 8),
    ("rloo", [1 - 4, 0, 0, 5 - 2] + [0] * 8), ("process_grpo", [-2 / 2.0001, 0, 0, 2 / 2.0001] + [0] * 8),
    # -2, 0 and 2 once each, and 0 of the lone one: the variance over four actions is 2
    ("reinforce_pp_baseline", [-2 / 2 ** 0.5, 0, 0, 2 / 2 ** 0.5] + [0] * 8)])
def test_a_response_without_a_score_is_no_part_of_its_group(name, advantages):
    rewards = torch.tensor([1, math.nan, 3, 5] + [math.nan, 7, math.nan, math.nan] + [math.nan] * 4)[:, None]
    found, _ = ESTIMATORS[name].fn(rewards, ~rewards.isnan(), group_size=4)
    torch.testing.assert_close(found[:, 0], torch.tensor(advantages, dtype=torch.float32))
