"""How a cost grows with a size: fits by least squares, and whether it grows faster than it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """cost = constant + slope * size. r2: share of the costs' variance that the line explains."""

    constant: float
    slope: float
    r2: float


class Power(NamedTuple):
    """cost = factor * size ** exponent, fitted in logarithms; r2 of the logarithms."""

    factor: float
    exponent: float
    r2: float


def line(sizes: Sequence[float], costs: Sequence[float]) -> Line:
    """Each residual is taken relative to its cost, for noise is; r2 counts them so too."""
    x, y = np.asarray(sizes, float), np.asarray(costs, float)
    weights = 1 / y
    constant, slope = np.linalg.lstsq(np.stack([weights, x * weights], 1), y * weights, rcond=None)[0]
    return Line(float(constant), float(slope), _r2(y, constant + slope * x, weights))


def power(sizes: Sequence[float], costs: Sequence[float]) -> Power:
    x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(costs, float))
    exponent, shift = np.polyfit(x, y, 1)
    return Power(float(np.exp(shift)), float(exponent), _r2(y, shift + exponent * x, np.ones_like(y)))


def bend(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The share of the largest size's cost that grows with the square of the size, from a fit of constant + slope *
    size + curve * size ** 2 with relative residuals: 0 where growth is linear, negative where it flattens."""
    x, y = np.asarray(sizes, float), np.asarray(costs, float)
    weights = 1 / y
    columns = np.stack([weights, x * weights, x * x * weights], 1)
    found = np.linalg.lstsq(columns / np.abs(columns).max(0), y * weights, rcond=None)[0] / np.abs(columns).max(0)
    return float(found[2] * x[-1] ** 2 / (found @ np.array([1, x[-1], x[-1] ** 2])))


def local_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The power by which the cost grows from the last size but one to the last, where constants weigh least."""
    return float(np.log(costs[-1] / costs[-2]) / np.log(sizes[-1] / sizes[-2]))


def _r2(values: np.ndarray, fitted: np.ndarray, weights: np.ndarray) -> float:
    mean = np.average(values, weights=weights**2)
    spread = float((weights**2 * (values - mean) ** 2).sum())
    left = float((weights**2 * (values - fitted) ** 2).sum())
    return 1 - left / spread if spread else 1.0
