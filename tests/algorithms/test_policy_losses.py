"""Policy losses beyond PPO's, aggregation, KL in the loss, importance weights and the overlong penalty, by hand."""

import math

import pytest
import torch

from hybrid_rlhf.algorithms.kl import kl_estimate, kl_loss
from hybrid_rlhf.algorithms.policy import (
    denominators,
    entropy_loss,
    importance_weights,
    policy_loss,
    sequences_within,
    value_loss,
)
from hybrid_rlhf.algorithms.shaping import overlong

OWNER = torch.tensor([0, 0, 1])  # a response of two actions and one of one
LOGS = torch.tensor([math.log(1.5), math.log(0.9), math.log(0.5)])  # log-ratios of the three


def loss_of(kind, advantages, denominator=1.0, cliprange=(0.2, 0.2), weights=None, new=LOGS, **options):
    new = new.clone().requires_grad_()
    loss, seen = policy_loss(new, torch.zeros(3), torch.tensor(advantages), cliprange=cliprange, kind=kind,
                             owner=OWNER, denominator=denominator, weights=weights, **options)
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


def test_sapo_fades_by_a_sigmoid_whose_temperature_goes_by_the_sign():
    loss, gradient, seen = loss_of("sapo", [1.0, -1.0, 0.0], sapo_temperature_pos=2.0, sapo_temperature_neg=4.0)
    gates = [1 / (1 + math.exp(-2 * 0.5)), 1 / (1 + math.exp(-4 * -0.1))]
    assert loss == pytest.approx(-gates[0] * 4 / 2 + gates[1] * 4 / 4, rel=1e-6)
    slopes = [4 * g * (1 - g) for g in gates]  # times the ratio: d ratio / d log
    torch.testing.assert_close(gradient, torch.tensor([-slopes[0] * 1.5, slopes[1] * 0.9, 0.0]))
    assert seen["policy/clip_fraction"] == seen["clip_ratio/low_mean"] == 0


def test_vespo_weighs_a_response_by_its_product_of_ratios_without_gradient():
    options = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 0.5, "vespo_lambda_neg": 1.5}
    loss, gradient, seen = loss_of("vespo", [1.0, 1.0, -2.0], cliprange=(1e-3, 1e-3), **options)
    pos, neg = 1.35 ** 2 * math.exp(3 * (1 - 1.35)), 0.5 ** 0.5 * math.exp(1.5 * (1 - 0.5))
    torch.testing.assert_close(gradient, torch.tensor([-pos, -pos, 2 * neg]))
    assert loss == pytest.approx(-pos * math.log(1.35) + 2 * neg * math.log(0.5), rel=1e-6)
    assert seen["policy/clip_fraction"] == 0 and seen["policy/ratio"] == pytest.approx((2 * 1.35 + 0.5) / 3, rel=1e-6)
    far = loss_of("vespo", [1.0, 1.0, -1.0], new=torch.tensor([60.0, 60.0, -90.0]), **options)
    assert not far[1].abs().max() > 1e-3  # both fade away


def test_the_four_aggregations_of_the_same_losses():
    # ratio 1 and A 1, 2, 6: losses -1, -2 | -6
    for name, expected in (("token", -9 / 3), ("sequence", (-1.5 - 6) / 2), ("constant", -9 / (2 * 8)),
                           ("sum", -9 / 2)):
        share = denominators(name, OWNER, num_actions=3, num_sequences=2, length=8)
        assert loss_of("ppo", [1.0, 2.0, 6.0], share, new=torch.zeros(3))[0] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="token, sequence, constant, sum"):
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


# --- Policy and value losses by hand, and that cutting a minibatch moves neither loss nor gradient

CLIP = (0.2, 0.2)


def losses_of(ratios, advantages, denominator=1, **options):
    new = torch.tensor(ratios).log().requires_grad_()
    loss, observed = policy_loss(new, torch.zeros(len(ratios)), torch.tensor(advantages),
                                 **{"cliprange": CLIP, "denominator": denominator, **options})
    loss.backward()
    return float(loss), new.grad, {name: float(mean) for name, (mean, _) in observed.items()}


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), [
    (1.1, 2.0, -2.2, -2.2),   # inside: -A r, gradient in log-probability -A r
    (1.5, 2.0, -2.4, 0.0),    # -2 * 1.2: too high and good, no further
    (0.5, 2.0, -1.0, -1.0),   # too low but good: back up
    (1.5, -2.0, 3.0, 3.0),    # too high and bad: down
    (0.5, -2.0, 1.6, 0.0),    # 2 * 0.8: too low and bad, no further
])
def test_the_clipped_surrogate_in_each_region(ratio, advantage, loss, gradient):
    got, grad, _ = losses_of([ratio], [advantage])
    assert got == pytest.approx(loss, rel=1e-5)
    assert float(grad) == pytest.approx(gradient, rel=1e-5)


def test_the_two_sides_of_the_clip_may_differ():
    # clip to [0.9, 1.3]
    assert losses_of([1.5], [1.0], cliprange=(0.1, 0.3))[0] == pytest.approx(-1.3, rel=1e-5)
    assert losses_of([0.5], [-1.0], cliprange=(0.1, 0.3))[0] == pytest.approx(0.9, rel=1e-5)


def test_the_dual_clip_bounds_bad_actions_only():
    assert losses_of([8.0], [-2.0])[0] == pytest.approx(16.0, rel=1e-5)
    loss, gradient, _ = losses_of([8.0], [-2.0], dual_clip=3.0)
    assert loss == pytest.approx(6.0) and float(gradient) == 0.0
    assert losses_of([2.0], [-2.0], dual_clip=3.0)[0] == pytest.approx(4.0, rel=1e-5)
    assert losses_of([1.0], [0.5], dual_clip=3.0)[0] == pytest.approx(-0.5)
    assert losses_of([0.01], [2.0], dual_clip=3.0)[0] == pytest.approx(-0.02, rel=1e-5)
    with pytest.raises(ValueError, match="above 1"):
        losses_of([1.0], [1.0], dual_clip=1.0)


def test_what_is_observed_of_five_actions():
    # The second is too high and the third too low; the fourth and fifth are as far out, but on their way back.
    loss, _, seen = losses_of([1.0, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0, 1.0], denominator=5)
    assert loss == pytest.approx((-1.0 - 1.2 + 0.8 + 1.5 - 0.5) / 5, rel=1e-5)
    assert seen["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert seen["policy/ratio"] == pytest.approx(5.0 / 5, rel=1e-6)
    assert seen["clip_ratio/low_mean"] == seen["clip_ratio/high_mean"] == pytest.approx(0.2)
    assert seen["clip_ratio/region_mean"] == seen["policy/clip_fraction"] == pytest.approx(0.4)
    # k3 of KL(old || new): ratio - 1 - log ratio
    k3 = [0.0, 0.5 - math.log(1.5), -0.5 - math.log(0.5), 0.5 - math.log(1.5), -0.5 - math.log(0.5)]
    assert seen["policy/approx_kl"] == pytest.approx(sum(k3) / 5, rel=1e-5)


def test_equal_policies_have_ratio_1_no_clipping_and_the_gradient_of_the_plain_policy_gradient():
    advantages = [0.5, -2.0, 3.0]
    _, gradient, seen = losses_of([1.0, 1.0, 1.0], advantages, denominator=3)
    torch.testing.assert_close(gradient, -torch.tensor(advantages) / 3)
    assert seen["policy/ratio"] == 1.0 and seen["policy/clip_fraction"] == 0.0 and seen["policy/approx_kl"] == 0.0


def test_a_ratio_on_the_edge_of_the_clip_is_not_clipped():
    assert losses_of([1.0, 1.0], [1.0, -1.0], cliprange=(0.0, 0.0))[2]["policy/clip_fraction"] == 0


def test_an_absurd_ratio_gives_a_finite_loss():
    loss, observed = policy_loss(torch.tensor([0.0, -400.0]), torch.tensor([-400.0, 0.0]), torch.tensor([-1.0, -1.0]),
                                 cliprange=CLIP, denominator=2)
    assert float(loss) == pytest.approx((math.exp(20) + 0.8) / 2, rel=1e-5)
    assert all(math.isfinite(float(mean)) for mean, _ in observed.values())


def actions(size=12):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, size, generator=generator)


@pytest.mark.parametrize("loss_of", [
    lambda new, old, target, n: policy_loss(new, old, target, cliprange=CLIP, denominator=n),
    lambda new, old, target, n: value_loss(new, old, target, cliprange_value=0.2, denominator=n),
], ids=["policy", "value"])
def test_cutting_a_minibatch_into_uneven_micro_batches_moves_neither_gradient_nor_report(loss_of):
    weights, features, old, target = actions()
    results = []
    for sizes in ([12], [1, 7, 0, 4]):  # one of them empty
        parameter = weights.clone().requires_grad_()
        pooled: dict[str, float] = {}
        total = 0.0
        for f, o, t, w in zip(features.split(sizes), old.split(sizes), target.split(sizes), parameter.split(sizes),
                              strict=True):
            loss, observed = loss_of(w * f, o, t, torch.tensor(12))
            loss.backward()
            total += float(loss)
            for name, (mean, weight) in observed.items():
                pooled[name] = pooled.get(name, 0.0) + float(mean) * weight / 12
        results.append((total, parameter.grad, pooled))
    (whole, whole_gradient, whole_report), (cut, cut_gradient, cut_report) = results
    assert cut == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(cut_gradient, whole_gradient, rtol=1e-5, atol=1e-7)
    assert cut_report == pytest.approx(whole_report, rel=1e-5)
    assert sum(abs(v) for v in whole_report.values()) > 0


@pytest.mark.parametrize(("new", "old", "target", "loss", "gradient"), [
    (1.1, 1.0, 2.0, 0.5 * 0.9**2, -0.9),   # inside the clip: both terms agree
    (1.5, 1.0, 2.0, 0.5 * 0.8**2, 0.0),    # moved 0.5 towards the return: (1.2 - 2)^2 is the larger, no gradient
    (0.5, 1.0, 2.0, 0.5 * 1.5**2, -1.5),   # moved away: the plain term is the larger
    (0.5, 1.0, 0.0, 0.5 * 0.8**2, 0.0),    # moved 0.5 down to the return: (0.8 - 0)^2 is the larger
])
def test_the_clipped_value_loss_in_each_region(new, old, target, loss, gradient):
    values = torch.tensor([new], requires_grad=True)
    got, _ = value_loss(values, torch.tensor([old]), torch.tensor([target]), cliprange_value=0.2, denominator=1)
    got.backward()
    assert float(got) == pytest.approx(loss, rel=1e-5)
    # where both terms agree, torch splits the gradient between them: the sum is the same
    assert float(values.grad) == pytest.approx(gradient, rel=1e-5, abs=1e-7)


def test_what_is_observed_of_the_values_and_that_the_clip_can_be_left_out():
    new, old, target = torch.tensor([1.5, 1.5, 0.5]), torch.ones(3), torch.tensor([2.0, 0.0, 2.0])
    loss, observed = value_loss(new, old, target, cliprange_value=0.2, denominator=3)
    # plain 0.25, 2.25, 2.25; clipped (1.2-2)^2 = 0.64, (1.2-0)^2 = 1.44, (0.8-2)^2 = 1.44; largest 0.64, 2.25, 2.25
    assert float(loss) == pytest.approx(0.5 * (0.64 + 2.25 + 2.25) / 3, rel=1e-5)
    assert float(observed["value/clip_fraction"][0]) == pytest.approx(1 / 3) and observed["value/loss"][1] == 3
    plain, observed = value_loss(new, old, target, cliprange_value=None, denominator=3)
    assert float(plain) == pytest.approx(0.5 * 4.75 / 3, rel=1e-5)
    assert float(observed["value/clip_fraction"][0]) == 0.0


def test_rounding_within_the_range_is_no_clipping():
    # 0.1 + (0.23 - 0.1) is a bit more than 0.23 away from 0.7 in fp32: the clipped term is larger by rounding alone
    _, observed = value_loss(torch.tensor([0.23]), torch.tensor([0.1]), torch.tensor([0.7]), cliprange_value=0.2,
                             denominator=1)
    assert float(observed["value/clip_fraction"][0]) == 0.0


def test_the_entropy_loss_is_minus_the_mean_over_the_whole_minibatch():
    assert float(entropy_loss(torch.tensor([1.0, 2.0]), denominator=torch.tensor(4))) == -0.75


def test_no_gradient_flows_into_what_is_given_and_half_precision_is_computed_in_fp32():
    given = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for call in (lambda n: policy_loss(n, *given, cliprange=CLIP, denominator=2),
                 lambda n: value_loss(n, *given, cliprange_value=0.2, denominator=2)):
        loss, _ = call(torch.zeros(2, dtype=torch.bfloat16, requires_grad=True))
        assert loss.dtype == torch.float32
        loss.backward()
    assert all(g.grad is None for g in given)


def test_shapes_that_would_broadcast_are_refused():
    for shape in ((3, 1), (1,), (3, 3)):
        with pytest.raises(ValueError, match="flat vectors"):
            policy_loss(torch.zeros(3), torch.zeros(shape), torch.zeros(3), cliprange=CLIP, denominator=3)
        with pytest.raises(ValueError, match="flat vectors"):
            policy_loss(torch.zeros(shape), torch.zeros(3), torch.zeros(3), cliprange=CLIP, denominator=3)
        with pytest.raises(ValueError, match="flat vectors"):
            value_loss(torch.zeros(3), torch.zeros(shape), torch.zeros(3), cliprange_value=0.2, denominator=3)
        with pytest.raises(ValueError, match="flat vectors"):
            value_loss(torch.zeros(shape), torch.zeros(3), torch.zeros(3), cliprange_value=0.2, denominator=3)
    with pytest.raises(ValueError, match="flat vectors"):
        value_loss(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), cliprange_value=0.2, denominator=3)
