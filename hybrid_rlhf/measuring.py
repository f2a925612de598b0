"""Passes of a role's engine without gradients: micro-batches in, numbers out in the shapes of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hybrid_rlhf.engine import HybridEngine, micro_batches
from hybrid_rlhf.models.shared_prefix import kinship
from hybrid_rlhf.policy import TokenScores
from hybrid_rlhf.rollout import Rollout
from hybrid_rlhf.tensors import SequenceBatch, scatter


def measure(engine: HybridEngine, batch: SequenceBatch, max_tokens: int, numbers: Callable) -> Iterator[tuple]:
    """(row indices, numbers(rows on the engine's device)) of micro-batches within the token budget, in eval mode."""
    engine.module.eval()
    with engine.active():
        yield from micro_batches.measure(engine, batch.attention_mask.sum(1), max_tokens,
                                         lambda index: numbers(batch.rows(index).to(engine.device)),
                                         kin(engine, batch))


def kin(engine: HybridEngine, batch: SequenceBatch) -> Tensor | None:
    """The number of each row's kin where rows begin alike and the module computes that once; None elsewhere."""
    module = engine.module
    if not hasattr(module, "can_share") or not len(batch) or batch.position_ids is not None:
        return None
    with engine.active():
        return kinship(batch) if module.can_share() else None


@torch.no_grad()
def per_action(engine: HybridEngine, rollout: Rollout, max_tokens: int, numbers: Callable) -> Tensor:
    """`numbers(rows)` -> one value per action, for the whole rollout as (B, R) fp32 on the CPU, zero at padding."""
    sequences = rollout.sequences(engine.pad_id)
    out = torch.zeros(rollout.action_mask.shape)
    for index, found in measure(engine, sequences, max_tokens, numbers):
        out[index] = scatter(found.float().cpu(), rollout.action_mask[index])
    return out


@torch.no_grad()
def per_sequence(engine: HybridEngine, batch: SequenceBatch, max_tokens: int) -> Tensor:
    """(B,) fp32 on the CPU: the summed log-probabilities of each row's marked tokens, without gradients."""
    out = torch.zeros(len(batch))
    for index, found in measure(engine, batch, max_tokens, lambda rows: summed(engine(rows), rows)):
        out[index] = found.cpu()
    return out


def summed(tokens: TokenScores, rows: SequenceBatch) -> Tensor:
    """(B,): the log-probabilities of each row's marked tokens, added up."""
    return scatter(tokens.logprobs, rows.loss_mask[:, 1:]).sum(1)
