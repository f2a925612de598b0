"""Losses on preferences: numbers worked out by hand, and TRL's own losses on the same tensors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.algorithms.preference import (
    LOSSES,
    best_and_worst,
    best_at_least,
    bradley_terry,
    dpo,
    hinge,
    ipo,
    kto,
    kto_kl,
    orpo,
    simpo,
)

LN3 = math.log(3)
T = torch.tensor


def test_dpo_by_hand() -> None:
    # sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4
    assert dpo(T([2 * LN3, 0.0]), T([0.0, 2 * LN3]), beta=0.5).tolist() == pytest.approx([math.log(4 / 3), math.log(4)])
    smoothed = dpo(T([LN3]), T([0.0]), beta=1.0, label_smoothing=0.25)
    assert smoothed.item() == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))


def test_ipo_and_hinge_by_hand() -> None:
    assert ipo(T([3.0, 5.0]), T([1.0, -1.0]), beta=0.25).tolist() == [0.0, 16.0]  # 1 / (2 beta) = 2
    assert hinge(T([3.0, 30.0, 0.0]), T([1.0, 0.0, 4.0]), beta=0.1).tolist() == pytest.approx([0.8, 0.0, 1.4])


def test_simpo_by_hand() -> None:
    # 2 (ln 3 - 0) - ln 3 = ln 3
    assert simpo(T([LN3]), T([0.0]), beta=2.0, simpo_gamma=LN3).item() == pytest.approx(math.log(4 / 3))


def test_orpo_by_hand() -> None:
    # p = 3/4 has odds 3, p = 1/2 has odds 1: log odds ratio ln 3
    found = orpo(T([math.log(0.75)]), T([math.log(0.5)]), beta=0.5)
    assert found.item() == pytest.approx(math.log(4 / 3) + 0.5 * math.log(4 / 3), rel=1e-6)


def test_orpo_is_finite_with_its_gradient_where_a_response_is_certain_or_hopeless() -> None:
    chosen, rejected = T([0.0, -1e-9, -200.0], requires_grad=True), T([-200.0, 0.0, -1e-9], requires_grad=True)
    losses = orpo(chosen, rejected, beta=1.0)
    losses.sum().backward()
    assert all(torch.isfinite(x).all() for x in (losses, chosen.grad, rejected.grad))


def test_kto_by_hand() -> None:
    ratios, labels, kl = T([LN3 + 1, 1.0, 1 - LN3]), T([True, True, False]), T(1.0)
    found = kto(ratios, labels, kl, beta=1.0, desirable_weight=2.0, undesirable_weight=4.0)
    assert found.tolist() == pytest.approx([0.5, 1.0, 1.0])
    halved = kto(T([2 * LN3 + 1]), T([True]), kl, beta=0.5, desirable_weight=2.0, undesirable_weight=4.0)
    assert halved.item() == pytest.approx(0.5)


def test_kto_s_point_of_reference_is_a_mean_over_all_processes_and_never_negative() -> None:
    other = T([5.0, 3.0], dtype=torch.float64)  # another process: sum 5 over 3 responses
    assert kto_kl(T([1.0, 2.0], requires_grad=True), lambda mine: mine + other).item() == pytest.approx(8 / 5)
    assert not kto_kl(T([1.0], requires_grad=True)).requires_grad
    assert kto_kl(T([-1.0, -2.0])).item() == 0.0
    assert kto_kl(T([3.0])).item() == 3.0 and kto_kl(T([])).item() == 0.0


def test_every_loss_falls_where_the_chosen_side_rises() -> None:
    for name, row in LOSSES.items():
        first, second = T([-1.0], requires_grad=True), T([-1.5], requires_grad=True)
        more = {"simpo_gamma": 0.5, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        if row.needs_pairs:
            losses = row.fn(first, second, beta=row.beta, **more)
        else:
            labels = T([True, False])
            losses = row.fn(torch.cat([first, second]), labels, T(0.0), beta=row.beta, **more)
        losses.sum().backward()
        assert first.grad.item() < 0 < second.grad.item(), name


def logps() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(-4 * torch.rand(7, generator=generator) - 0.01 for _ in range(2))


def test_orpo_s_odds_ratio_is_trl_s() -> None:
    trainers = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    chosen, rejected = logps()
    stand = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    theirs = trainers.ORPOTrainer.odds_ratio_loss(stand, chosen, rejected)[0]  # TRL subtracts it from its own nll
    torch.testing.assert_close(orpo(chosen, rejected, beta=0.3) + chosen, -theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["simpo", "sigmoid", "hinge", "ipo"])
def test_losses_on_pairs_are_those_of_trl_s_cpo_trainer(loss_type, label_smoothing) -> None:
    """CPO's sigmoid, hinge and ipo are DPO's with a constant reference; simpo is there and nowhere else."""
    trainers = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    chosen, rejected = logps()
    stand = SimpleNamespace(beta=0.7, alpha=0.0, simpo_gamma=0.4, label_smoothing=label_smoothing, loss_type=loss_type,
                            accelerator=SimpleNamespace(device="cpu"))
    theirs = trainers.CPOTrainer.cpo_loss(stand, chosen, rejected)[0]
    ours = LOSSES[loss_type].fn(chosen, rejected, beta=0.7, simpo_gamma=0.4, label_smoothing=label_smoothing)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_best_and_the_worst_of_each_group_that_has_two_scores() -> None:
    nan = math.nan
    best, worst = best_and_worst(T([1.0, 3.0, 3.0, nan, 2.0, -2.0, 4.0, 4.0, 4.0, nan, nan, -7.0]), 3)
    assert (best.tolist(), worst.tolist()) == ([1, 4], [0, 5])
    assert best_at_least(T([1.0, 3.0, 3.0, nan, 2.0, -2.0, nan, nan, nan]), 3, 2.0).tolist() == [1, 4]
    assert best_at_least(T([1.0, 3.0, nan, 2.0]), 2, 2.5).tolist() == [1]
    assert best_at_least(T([1.0, 3.0, 4.0, 2.0, nan, -3.0]), 2, -5.0).tolist() == [1, 2, 5]


# --- Bradley-Terry by hand

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
