"""Per-token estimates of the KL divergence to the reference policy, and its coefficient."""

from __future__ import annotations

import math

from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k1") -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, from tokens that the policy sampled.

    logprobs, ref_logprobs: the same shape, (B, R) or flat; the result has it too, fp32. Values at padding are
    meaningless: mask them. With D = logprobs - ref_logprobs (Schulman, "Approximating KL divergence"):
    k1 = D, unbiased, of either sign; k2 = D^2 / 2, biased, >= 0; k3 = exp(-D) - 1 + D, unbiased, >= 0, with D clamped
    to +-10 so that one token cannot outweigh a batch. Raises ValueError for another name.
    """
    difference = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        difference = difference.clamp(-10, 10)
        return (-difference).expm1() + difference  # expm1: exp(-D) - 1 loses all digits for small D
    raise ValueError(f"KL estimator {estimator!r}: there are {', '.join(KL_ESTIMATORS)}")


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, estimator: str, denominator: Tensor | float,
            ratio: Tensor | None = None) -> Tensor:
    """The mean KL(policy || reference) as a term of the loss, in nats; vectors (N,), denominator as of policy_loss.

    Its gradient is that of the estimate: correct for k2, GRPO's for k3 (arXiv 2402.03300), and zero on average for k1.
    ratio (N,): each estimate is multiplied by its action's (policy.kl_ratio), with the ratio's gradient, which makes
    that of k3 the unbiased one of the KL (DeepSeek-V3.2, arXiv 2512.02556).
    """
    estimate = kl_estimate(logprobs, ref_logprobs.detach(), estimator)
    return ((estimate if ratio is None else estimate * ratio) / denominator).sum()


class FixedKL:
    """A constant kl_coef."""

    def __init__(self, value: float) -> None:
        self.value = float(value)

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """Does nothing."""

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class AdaptiveKL:
    """A kl_coef that rises while the KL is above `target` and falls while it is below (arXiv 1909.08593, section 2.2).

    target: nats per sequence. horizon: number of sequences over which the coefficient moves by at most a fifth.
    Raises ValueError if either is not positive.
    """

    def __init__(self, value: float, target: float, horizon: int) -> None:
        if not (target > 0 and horizon > 0):
            raise ValueError(f"adaptive KL: target {target} and horizon {horizon} must both be positive")
        self.value, self.target, self.horizon = float(value), target, horizon

    def update(self, mean_kl: float, num_sequences: int) -> None:
        """value *= 1 + clip(mean_kl / target - 1, +-0.2) * num_sequences / horizon.

        mean_kl is the mean over all num_sequences of all ranks: with different values the ranks would drift apart.
        Raises ValueError for a mean_kl that is not finite, and for a step that would turn the coefficient negative
        (more than five horizons at once).
        """
        if not math.isfinite(mean_kl):
            raise ValueError(f"adaptive KL: the mean KL of the step is {mean_kl}")
        factor = 1 + max(-0.2, min(0.2, mean_kl / self.target - 1)) * num_sequences / self.horizon
        if factor <= 0:
            raise ValueError(f"adaptive KL: {num_sequences} sequences a step are too many for horizon {self.horizon}")
        self.value *= factor

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


class UpdateRate:
    """A factor of the learning rate, adapted so that the updates on a rollout move the policy by `target` nats a token.

    After each rollout it is multiplied by sqrt(target / kl), as the KL of small moves grows with their square, but by
    no less than 0.1 and no more than 1.5; it is never above 1. (An adaptive rate with steps of 1.5 is that of
    2109.11978; from a rate twenty times too high such steps come too late.) target None or 0: it stays 1.
    """

    def __init__(self, target: float | None) -> None:
        self.target, self.value = target, 1.0

    def update(self, kl: float) -> None:
        """Adapt after the updates on a rollout, which moved the policy by `kl` nats per token. A kl that is not finite
        counts as too far."""
        if not self.target:
            return
        change = math.sqrt(self.target / max(kl, 1e-12)) if math.isfinite(kl) else 0.0
        self.value = min(1.0, self.value * min(1.5, max(0.1, change)))

    def state(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state(self, state: dict[str, float]) -> None:
        if self.target:  # another run's rate, where this one goes on without a target, would stay for ever
            self.value = float(state["value"])
