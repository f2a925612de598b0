"""What two processes train on, each its own rows of a common batch, and how it is compared; see rank_checks.py."""

from __future__ import annotations

import torch

from hybrid_rlhf.core.distributed import rank
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, pad_right

STEPS = 3
SPLITS = [(4, 4), (8, 0), (3, 5)]  # rows of the two processes, step by step


def rows_of(step: int) -> tuple[SequenceBatch, list[list[int]]]:
    """Eight ragged sequences, the last half of each to be predicted, and the same as lists."""
    generator = torch.Generator().manual_seed(100 + step)
    lists = [torch.randint(4, 300, (int(n),), generator=generator).tolist()
             for n in torch.randint(6, 20, (8,), generator=generator)]
    mask = length_mask(torch.tensor([len(r) for r in lists]))
    prompt = length_mask(torch.tensor([len(r) // 2 for r in lists]), mask.shape[1])
    return SequenceBatch(pad_right(lists, 0), mask, mask & ~prompt), lists


def own_rows(step: int) -> torch.Tensor:
    first = 0 if rank() == 0 else SPLITS[step][0]
    return torch.arange(first, first + SPLITS[step][rank()])


def tokens_allowed() -> int:
    """Budgets so unlike that the processes run unlike numbers of micro-batches."""
    return 24 if rank() == 0 else 400


def plain_loss(model: torch.nn.Module, lists: list[list[int]]) -> torch.Tensor:
    """Mean negative log-likelihood, one unpadded sequence at a time, from whole logits."""
    losses = []
    for row in lists:
        logits = model(input_ids=torch.tensor([row])).logits[0]
        start = len(row) // 2
        losses.append(torch.nn.functional.cross_entropy(logits[start - 1 : -1], torch.tensor(row[start:]),
                                                        reduction="none"))
    return torch.cat(losses).mean()


def relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def moved(weights: dict, before: dict) -> torch.Tensor:
    return torch.cat([(weights[k].float() - before[k].float()).flatten() for k in before])
