"""A minimal forward by which a process joins the collectives of others that have more to compute."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_rlhf.core.tensors import SequenceBatch


def dummy_batch(pad_id: int, device: torch.device) -> SequenceBatch:
    """The smallest batch: one sequence of two tokens, of which one is predicted."""
    ids = torch.full((1, 2), pad_id, device=device)
    real = torch.ones_like(ids, dtype=torch.bool)
    return SequenceBatch(ids, real, real)


def zero_of(output: object) -> Tensor:
    """A zero with zero gradient that depends on every float in an output (a tensor, or an object of tensors)."""
    numbers = [output] if isinstance(output, Tensor) else [v for v in vars(output).values() if isinstance(v, Tensor)]
    return sum(v.float().sum() for v in numbers if v.is_floating_point()) * 0.0
