"""GAE, whitening and explained variance, by hand and under changes that must not matter."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.algorithms.advantages import ESTIMATORS, decoupled, explained_variance, gae, whiten
from hybrid_rlhf.core.tensors import length_mask

NAN = math.nan


def test_gae_of_three_actions_is_what_the_definition_gives_by_hand():
    # gamma 0.9, lam 0.5, gamma*lam = 0.45; rewards 0.1, -0.2, 1; values 0.5, 0.4, 0.3
    # delta_2 = 1 + 0.9*0 - 0.3 = 0.7                A_2 = 0.7
    # delta_1 = -0.2 + 0.9*0.3 - 0.4 = -0.33         A_1 = -0.33 + 0.45*0.7 = -0.015
    # delta_0 = 0.1 + 0.9*0.4 - 0.5 = -0.04          A_0 = -0.04 + 0.45*-0.015 = -0.04675
    advantages, returns = gae(torch.tensor([[0.1, -0.2, 1.0]]), torch.ones(1, 3, dtype=torch.bool),
                              values=torch.tensor([[0.5, 0.4, 0.3]]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.04675, -0.015, 0.7]]))
    torch.testing.assert_close(returns, torch.tensor([[0.45325, 0.385, 1.0]]))


def test_gae_defaults_are_gamma_1_and_lambda_095():
    # delta_1 = 1 - 0.25 = 0.75; delta_0 = 0 + 0.25 - 0.5 = -0.25; A_0 = -0.25 + 0.95*0.75 = 0.4625
    advantages, _ = gae(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool),
                        values=torch.tensor([[0.5, 0.25]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.4625, 0.75]]))


def test_with_lambda_1_returns_are_discounted_sums_of_rewards_whatever_the_values():
    # 1 + 0.5*(2 + 0.5*4) = 3; 2 + 0.5*4 = 4; 4
    _, returns = gae(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool),
                     values=torch.tensor([[7.0, -3.0, 11.0]]), gamma=0.5, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 4.0]]))


def test_the_value_after_the_last_action_is_zero_and_padding_is_never_read():
    mask = torch.tensor([[True, True, False, False], [True, True, True, True]])
    rewards = torch.tensor([[0.0, 1.0, NAN, 9.0], [0.0, 0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 8.0, NAN], [0.5, 0.25, 0.5, 0.25]])
    advantages, returns = gae(rewards, mask, values=values)
    # The first row is the two-action case above; had V at the padding been read, A_1 would be 8.75 or NaN.
    torch.testing.assert_close(advantages[0], torch.tensor([0.4625, 0.75, 0.0, 0.0]))
    torch.testing.assert_close(returns[0], torch.tensor([0.9625, 1.0, 0.0, 0.0]))
    assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()


def test_columns_between_actions_that_are_none_are_stepped_over():
    mask = torch.tensor([[True, False, True]])
    advantages, returns = gae(torch.tensor([[0.0, NAN, 1.0]]), mask, values=torch.tensor([[0.5, NAN, 0.25]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.4625, 0.0, 0.75]]))
    torch.testing.assert_close(returns, torch.tensor([[0.9625, 0.0, 1.0]]))


def test_gamma_is_the_same_for_every_row_and_every_call():
    # Lengths differ, so that a gamma multiplied up along the way (or over batches) would show.
    mask = length_mask([1, 4, 4])
    rewards = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1.0], [0, 0, 0, 1.0]])
    first = gae(rewards, mask, values=torch.zeros(3, 4), gamma=0.5, lam=1.0)[0]
    second = gae(rewards, mask, values=torch.zeros(3, 4), gamma=0.5, lam=1.0)[0]
    expected = torch.tensor([[1.0, 0, 0, 0], [0.125, 0.25, 0.5, 1.0], [0.125, 0.25, 0.5, 1.0]])
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), extra=st.integers(1, 3), seed=st.integers(0, 999))
def test_more_padding_changes_no_advantage(lengths, extra, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = length_mask(lengths, 6)
    rewards, values = torch.randn(2, *mask.shape, generator=generator)
    wide = length_mask(lengths, 6 + extra)
    filled = [torch.cat([x.masked_fill(~mask, 5.0), torch.full((len(lengths), extra), NAN)], 1)
              for x in (rewards, values)]
    for narrow_result, wide_result in zip(gae(rewards, mask, values=values), gae(filled[0], wide, values=filled[1]),
                                          strict=True):
        torch.testing.assert_close(wide_result[:, :6], narrow_result, rtol=0, atol=0)
        assert not wide_result[:, 6:].any()


def test_inputs_stay_as_they_were_and_half_precision_is_computed_in_fp32():
    rewards, values = torch.tensor([[0.1, 1.0]]).bfloat16(), torch.tensor([[0.5, 0.25]]).bfloat16()
    before = rewards.clone(), values.clone()
    advantages, _ = gae(rewards, torch.tensor([[True, False]]), values=values)
    assert advantages.dtype == torch.float32
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1])


def test_every_row_of_the_table_takes_the_same_keywords_and_says_what_it_needs():
    wanted = {"rewards", "action_mask", "values", "gamma", "lam", "reduce", "group_size", "step_ends"}
    for row in ESTIMATORS.values():
        assert set(inspect.signature(row.fn).parameters) == wanted
    assert ESTIMATORS["gae"].needs_values and not ESTIMATORS["gae"].needs_group


def test_whitening_removes_the_mean_and_divides_by_the_population_deviation():
    # 1, 2, 3, 6: mean 3, deviations -2 -1 0 3, variance 14/4 = 3.5
    out = whiten(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(out, torch.tensor([[-2.0, -1.0], [0.0, 3.0]]) / math.sqrt(3.5))
    assert abs(float(out.sum())) < 1e-6


def test_whitening_ignores_padding():
    mask = torch.tensor([[True, True, False], [True, True, False]])
    out = whiten(torch.tensor([[1.0, 2.0, NAN], [3.0, 6.0, 1e9]]), mask)
    torch.testing.assert_close(out, torch.tensor([[-2.0, -1.0, 0.0], [0.0, 3.0, 0.0]]) / math.sqrt(3.5))


def test_whitening_a_single_action_or_equal_actions_gives_zeros():
    assert whiten(torch.tensor([[4.0]]), torch.ones(1, 1, dtype=torch.bool)).tolist() == [[0.0]]
    assert whiten(torch.full((2, 2), 4.0), torch.ones(2, 2, dtype=torch.bool)).abs().max() == 0
    assert whiten(torch.full((2, 2), 4.0), torch.zeros(2, 2, dtype=torch.bool)).abs().max() == 0


def test_whitening_keeps_its_digits_far_from_zero():
    values = 1000 + torch.tensor([[1.0, 2.0, 3.0, 6.0]]) / 64  # exact in fp32
    out = whiten(values, torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(out, torch.tensor([[-2.0, -1.0, 0.0, 3.0]]) / math.sqrt(3.5), rtol=1e-4, atol=1e-4)


def test_whitening_is_over_the_actions_of_all_ranks():
    # Rank 0 holds 1, 2 and rank 1 holds 3, 6. The two calls run in lockstep: each sum is over both.
    from threading import Barrier, Thread

    parts, sums, barrier, out = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 6.0]])], [None, None], Barrier(2), {}

    def rank(i):
        def reduce(value):
            sums[i] = value
            barrier.wait(10)
            total = sums[0] + sums[1]
            barrier.wait(10)
            return total

        out[i] = whiten(parts[i], torch.ones(1, 2, dtype=torch.bool), reduce=reduce)

    threads = [Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = torch.tensor([[-2.0, -1.0], [0.0, 3.0]]) / math.sqrt(3.5)
    torch.testing.assert_close(torch.cat([out[0], out[1]]), expected)


def test_explained_variance_by_hand():
    # returns 1, 2, 3, 6: variance 3.5; errors 0, 0, 0, 4: mean 1, variance (1+1+1+9)/4 = 3; 1 - 3/3.5
    returns, values = torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[1.0, 2.0], [3.0, 2.0]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    assert float(explained_variance(values, returns, mask)) == pytest.approx(1 - 3 / 3.5)
    assert float(explained_variance(returns, returns, mask)) == 1.0
    assert float(explained_variance(torch.zeros(2, 2), returns, mask)) == pytest.approx(0.0)


def test_explained_variance_ignores_padding_and_survives_constant_returns():
    mask = torch.tensor([[True, True, False]])
    assert float(explained_variance(torch.tensor([[1.0, 2.0, NAN]]), torch.tensor([[1.0, 2.0, 99.0]]), mask)) == 1.0
    assert float(explained_variance(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2), mask[:, :2])) == 0.0
    assert float(explained_variance(torch.zeros(1, 2), torch.ones(1, 2), ~mask[:, :2])) == 0.0


# --- Estimators without a critic, by hand: groups of two and more, and what they do with lengths and padding

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


def test_batch_grpo_and_gdpo_divide_by_the_deviation_of_all_responses_of_all_ranks():
    # totals 1, 3 | 2, 7: mean 3.25, squares 5.0625 + 0.0625 + 1.5625 + 14.0625 = 20.75
    for ranks in (1, 2):  # a second rank has the same four
        spread = (ranks * 20.75 / (4 * ranks - 1)) ** 0.5 + 1e-4
        for name, expected in (("batch_grpo", [-1.0, 1.0, -2.5, 2.5]), ("gdpo", [-2.25, -0.25, -1.25, 3.75])):
            found, returns = ESTIMATORS[name].fn(REWARDS, MASK, group_size=2, reduce=lambda x, n=ranks: n * x)
            torch.testing.assert_close(found, at_actions(*expected) / spread)
            torch.testing.assert_close(returns, at_actions(1.0, 3.0, 2.0, 7.0))


def test_each_source_is_normalised_in_its_group_and_then_weighed_and_summed():
    first = torch.tensor([1.0, 3.0, 5.0, 4.0, 4.0, NAN])  # deviations 2 and 0
    second = torch.tensor([0.0, NAN, 10.0, 1.0, 2.0, NAN])  # 50^0.5 and 0.5^0.5
    wide, narrow = 50 ** 0.5 + 1e-4, 0.5 ** 0.5 + 1e-4
    torch.testing.assert_close(decoupled([(first, 2.0), (second, -1.0)], 3), torch.tensor([
        -2 * 2 / 2.0001 + 5 / wide, 0.0, 2 * 2 / 2.0001 - 5 / wide, 0.5 / narrow, -0.5 / narrow, NAN]), equal_nan=True)
    with pytest.raises(ValueError, match="whole groups"):
        decoupled([(first, 1.0)], 4)


def test_equal_scores_are_exactly_zero_when_they_are_decoupled():
    assert not decoupled([(torch.full((8,), 73.3), 1.0)], 8).any()


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
    assert GROUPED == ["reinforce_pp_baseline", "rloo", "grpo", "batch_grpo", "gdpo", "process_grpo", "dr_grpo"]


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_is_one_response_where_nothing_is_said_and_so_is_refused(name):
    with pytest.raises(ValueError, match="4 responses in groups of 1"):
        ESTIMATORS[name].fn(REWARDS, MASK)


WIDE = (20 / 3) ** 0.5 + 1e-4


@pytest.mark.parametrize(("name", "advantages"), [
    # of 1, 3 and 5 the mean is 3 and the deviation 2; a lone score has nothing to be compared with
    ("grpo", [-2 / 2.0001, 0, 0, 2 / 2.0001] + [0] * 8), ("dr_grpo", [-2, 0, 0, 2] + [0] * 8),
    ("rloo", [1 - 4, 0, 0, 5 - 2] + [0] * 8), ("process_grpo", [-2 / 2.0001, 0, 0, 2 / 2.0001] + [0] * 8),
    # the spread and the mean of 1, 3, 5 and 7 are (20 / 3)^0.5 and 4
    ("batch_grpo", [-2 / WIDE, 0, 0, 2 / WIDE] + [0] * 8), ("gdpo", [-3 / WIDE, 0, -1 / WIDE, 1 / WIDE, 0, 3 / WIDE]
                                                            + [0] * 6),
    # -2, 0 and 2 once each, and 0 of the lone one: the variance over four actions is 2
    ("reinforce_pp_baseline", [-2 / 2 ** 0.5, 0, 0, 2 / 2 ** 0.5] + [0] * 8)])
def test_a_response_without_a_score_is_no_part_of_its_group(name, advantages):
    rewards = torch.tensor([1, math.nan, 3, 5] + [math.nan, 7, math.nan, math.nan] + [math.nan] * 4)[:, None]
    found, _ = ESTIMATORS[name].fn(rewards, ~rewards.isnan(), group_size=4)
    torch.testing.assert_close(found[:, 0], torch.tensor(advantages, dtype=torch.float32))
