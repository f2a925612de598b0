"""Reward sources: anything with a name and `score(rollout) -> (B,)`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hybrid_rlhf.rollout import Rollout


class RewardSource(Protocol):
    """What an on-policy method is paid by. `name` appears in the metrics as rewards/{name}/mean and /std."""

    name: str

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) fp32 scores of whole responses, higher is better."""
        ...


class BadScore(RuntimeError):
    """A source answered with something that must not be trained on."""


def checked_scores(source: RewardSource, rollout: Rollout) -> Tensor:
    """The source's scores, (B,) and finite. Raises BadScore naming the source and the first bad sample."""
    scores = torch.as_tensor(source.score(rollout), dtype=torch.float32)
    if scores.shape != (len(rollout),):
        raise BadScore(f"reward source {source.name}: {len(rollout)} responses, scores of shape {tuple(scores.shape)}")
    if not torch.isfinite(scores).all():
        first = int((~torch.isfinite(scores)).nonzero()[0])
        text = rollout.completions[first] if rollout.completions else ""
        raise BadScore(f"reward source {source.name}: score {float(scores[first])} for response {first}: {text!r}")
    return scores
