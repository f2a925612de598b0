"""Metrics pool observations: a mean by its weights, a spread and extremes over all that was seen."""

import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics


def test_a_mean_is_divided_by_its_own_weight():
    metrics = Metrics().add("loss", 1.0, 3) + Metrics().add("loss", 5.0, 1)
    assert metrics.compute() == {"loss": 2.0}


def test_spreads_and_extremes_of_parts_are_those_of_the_whole():
    values = torch.tensor([3.0, -1.0, 4.0, 1e4, 5.0, 9.0, 2.0])
    total = Metrics()
    for part in (values[:3], values[3:3], values[3:4], values[4:]):
        metrics = Metrics()
        for kind in ("std", "min", "max"):
            metrics.add_spread(kind, part, kind)
        total += metrics
    assert total.compute() == pytest.approx({"std": float(values.double().std(correction=0)), "min": -1.0, "max": 1e4})


def test_a_spread_far_from_zero_does_not_cancel():
    values = torch.tensor([1e8, 1e8 + 8, 1e8 + 16], dtype=torch.float64)
    metrics = Metrics().add_spread("std", values[:1], "std") + Metrics().add_spread("std", values[1:], "std")
    assert metrics.compute()["std"] == pytest.approx((128 / 3) ** 0.5, rel=1e-9)


def test_what_nobody_observed_has_a_name_and_no_value():
    metrics = Metrics().add("loss", float("nan"), 0).add_spread("least", torch.zeros(0), "min")
    assert metrics.compute() == {}
    assert (metrics + Metrics().add("loss", 2.0)).compute() == {"loss": 2.0}


def test_one_name_has_one_meaning():
    with pytest.raises(ValueError, match="recorded as a mean"):
        Metrics().add("reward", 1.0).add_spread("reward", torch.ones(2), "max")
