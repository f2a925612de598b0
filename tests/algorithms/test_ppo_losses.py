"""Policy and value losses by hand, and that cutting a minibatch moves neither loss nor gradient."""

import math

import pytest
import torch

from hybrid_rlhf.algorithms.policy import entropy_loss, policy_loss, value_loss

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
