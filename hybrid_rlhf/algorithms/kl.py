"""Estimates of KL(actor || reference) from sampled tokens, and the two controllers of its price.

Estimators: Schulman, "Approximating KL divergence" (k1, k2, k3). Controllers: 1909.08593, section 2.2.
"""

from __future__ import annotations

from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate in nats, any shape: with D = logprobs - ref_logprobs, k1 = D, k2 = D^2 / 2,
    k3 = exp(-D) - 1 + D with D clamped to +-10 before the exponential."""
    difference = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        clamped = difference.clamp(-10, 10)
        return (-clamped).exp() - 1 + clamped
    raise ValueError(f"kl estimator {estimator!r}; choose one of {', '.join(ESTIMATORS)}")


class FixedKL:
    """A price that stays."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """Nothing moves a fixed price."""

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKL:
    """value *= 1 + clip(mean_kl / target - 1, +-0.2) * num_sequences / horizon.

    target in nats per sequence, horizon in sequences.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, mean_kl: float, num_sequences: int) -> None:
        error = min(max(mean_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * num_sequences / self.horizon

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.value = state["value"]
