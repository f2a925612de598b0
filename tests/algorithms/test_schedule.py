"""Learning rates by hand, and against transformers' own schedules."""

import math

import pytest

from hybrid_rlhf.algorithms.schedule import KINDS, learning_rate_factor


@pytest.mark.parametrize(("kind", "values"), [
    # 100 steps, 10 of warm-up: step 0, 4, 9 (the peak), 10, 55 (half way down), 99 (the last), 100
    ("cosine", [0.1, 0.5, 1.0, 1.0, 0.5, 0.5 * (1 + math.cos(math.pi * 89 / 90)), 0.0]),
    ("linear", [0.1, 0.5, 1.0, 1.0, 0.5, 1 / 90, 0.0]),
    ("constant_with_warmup", [0.1, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ("constant", [1.0] * 7),
])
def test_factors_at_the_start_the_peak_the_middle_and_the_end(kind, values):
    got = [learning_rate_factor(s, total_steps=100, warmup_steps=10, kind=kind) for s in (0, 4, 9, 10, 55, 99, 100)]
    assert got == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 1, 2, 50])
def test_no_update_of_a_run_is_made_at_rate_zero(kind, warmup):
    assert all(learning_rate_factor(s, total_steps=50, warmup_steps=warmup, kind=kind) > 0 for s in range(50))


def test_without_warm_up_the_first_step_is_at_the_peak():
    for kind in KINDS:
        assert learning_rate_factor(0, total_steps=10, warmup_steps=0, kind=kind) == 1.0


def test_past_the_end_nothing_is_learned_any_more():
    for kind in ("cosine", "linear"):
        assert learning_rate_factor(150, total_steps=100, warmup_steps=10, kind=kind) == 0.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "warmup"), [(20, 0), (20, 5), (7, 7), (1, 0), (1, 1), (5, 9)])
def test_every_step_has_the_factor_of_transformers_but_warm_up_is_one_step_ahead_of_its(kind, total, warmup):
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    oracle = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    theirs = []
    for _ in range(total + 2):
        theirs.append(oracle.get_last_lr()[0])
        optimizer.step()
        oracle.step()
    for step in range(total + 1):
        is_warm = step >= warmup or kind == "constant"
        expected = theirs[step] if is_warm else theirs[step + 1] if step + 1 < warmup else 1.0
        found = learning_rate_factor(step, total_steps=total, warmup_steps=warmup, kind=kind)
        assert found == pytest.approx(expected, abs=1e-12), step


def test_an_unknown_schedule_is_refused_with_the_known_names():
    with pytest.raises(ValueError, match=r"polynomial.*cosine"):
        learning_rate_factor(0, total_steps=1, kind="polynomial")


def test_the_usual_schedule_is_a_cosine_without_warm_up():
    found = [learning_rate_factor(step, total_steps=4) for step in range(2)]
    assert found == pytest.approx([1.0, 0.5 * (1 + math.cos(math.pi / 4))])
