"""The scale that a reward model's scores are put on before they become rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.shaping import normalise


@dataclass(frozen=True)
class Scale:
    """(score - mean) / std, bounded to +-bound (None: not at all).

    mean, std: of the scores that stage 2 measured on held-out pairs. A bound in standard deviations means something on
    this scale alone, so scores that nobody normalised are never bounded.
    """

    mean: float
    std: float
    bound: float | None = None

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (B,) on the scale, and (B,) bool, which of them the bound has moved. NaN stays NaN."""
        scaled = normalise(scores, self.mean, self.std)
        if self.bound is None:
            return scaled, torch.zeros_like(scaled, dtype=torch.bool)
        return scaled.clamp(-self.bound, self.bound), scaled.abs() > self.bound
