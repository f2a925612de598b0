"""Several sources as one: a weighted sum, each part reported under its own name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.shaping import normalise
from hybrid_rlhf.rewards import RewardSource, part_scores
from hybrid_rlhf.rollout import Rollout


@dataclass
class Part:
    """A source and its weight. mean, std: the scale that its scores are put on before they are weighted."""

    source: RewardSource
    weight: float = 1.0
    mean: float = 0.0
    std: float = 1.0


@dataclass
class Mixture:
    """sum_k weight_k * (score_k - mean_k) / std_k over the sources that did not skip the response, as TRL adds them.

    A response that all of them skip has no score (None). Each part's own scores, not weighted, go to
    `rollout.source_scores`, NaN where it skipped.
    """

    parts: list[Part]
    name: str = "mixture"

    def score(self, rollout: Rollout) -> list[float | None]:
        total, is_scored = torch.zeros(len(rollout)), torch.zeros(len(rollout), dtype=torch.bool)
        for part in self.parts:
            scores = part_scores(part.source, rollout)  # (B,)
            rollout.source_scores[part.source.name] = scores
            total += self._share(part, scores)
            is_scored |= ~torch.isnan(scores)
        return [value if known else None for value, known in zip(total.tolist(), is_scored.tolist(), strict=True)]

    @staticmethod
    def _share(part: Part, scores: Tensor) -> Tensor:
        return torch.nan_to_num(part.weight * normalise(scores, part.mean, part.std), nan=0.0)
