"""Several sources as one: a weighted sum of their scaled scores, each part reported under its own name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.shaping import normalise
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.rewards import Reporting, RewardSource, part_scores
from hybrid_rlhf.rollout import Rollout


@dataclass(frozen=True)
class Scale:
    """(score - mean) / std, clipped to +-bound (None: not clipped).

    mean, std: of the scores that stage 2 measured on held-out pairs. The bound is in standard deviations, so scores
    that are not normalised are never clipped.
    """

    mean: float
    std: float
    bound: float | None = None

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scaled scores (B,), and (B,) bool, which of them were clipped. NaN stays NaN."""
        scaled = normalise(scores, self.mean, self.std)
        if self.bound is None:
            return scaled, torch.zeros_like(scaled, dtype=torch.bool)
        return scaled.clamp(-self.bound, self.bound), scaled.abs() > self.bound


@dataclass
class Part:
    """A source, its weight, and the scale of its scores, applied before the weight (None: as they are)."""

    source: RewardSource
    weight: float = 1.0
    scale: Scale | None = None


@dataclass
class Mixture:
    """sum_k weight_k * scale_k(score_k) over the sources that did not skip the response, as TRL adds them.

    A response that all of them skip has no score (None). Each part's own scores, neither scaled nor weighted, go to
    `rollout.source_scores`, NaN where it skipped, and its weight to source_weights; which responses were clipped goes
    to `rollout.is_clipped`; the weighted sum of scores of single tokens to `rollout.token_scores`, and the tokens where
    any part has one to step_ends.
    """

    parts: list[Part]
    name: str = "mixture"

    def score(self, rollout: Rollout) -> list[float | None]:
        total, is_scored = torch.zeros(len(rollout)), torch.zeros(len(rollout), dtype=torch.bool)
        placed: Tensor | None = None
        ends: Tensor | None = None
        for part in self.parts:
            rollout.token_scores = rollout.step_ends = None
            scores = part_scores(part.source, rollout)  # (B,)
            _weigh(rollout, part)
            if rollout.token_scores is not None:
                weighted = part.weight * rollout.token_scores  # (B, R)
                placed = weighted if placed is None else placed + weighted
            if rollout.step_ends is not None:
                ends = rollout.step_ends if ends is None else ends | rollout.step_ends
            rollout.source_scores[part.source.name] = scores
            is_skipped = torch.isnan(scores)
            if part.scale is not None:
                scores, rollout.is_clipped = part.scale(scores)  # of a stage-2 model, one at most
            total += torch.where(is_skipped, 0.0, part.weight * scores)
            is_scored |= ~is_skipped
        rollout.token_scores, rollout.step_ends = placed, ends
        return [value if known else None for value, known in zip(total.tolist(), is_scored.tolist(), strict=True)]

    def report(self, metrics: Metrics) -> None:
        """The metrics of its parts."""
        for part in self.parts:
            if isinstance(part.source, Reporting):
                part.source.report(metrics)


def _weigh(rollout: Rollout, part: Part) -> None:
    """Set the part's weight, and multiply those of its items (a judge's) by it."""
    name, weights = part.source.name, rollout.source_weights
    weights |= {item: part.weight * weight for item, weight in weights.items() if item.startswith(f"{name}/")}
    weights[name] = part.weight
