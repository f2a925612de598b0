"""No-grad scoring: micro-batches through a role's engine, results in the shapes of an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rlhf.core.tensors import SequenceBatch, last_true, scatter, summed_by_row
from hybrid_rlhf.engine import HybridEngine
from hybrid_rlhf.engine.train import accumulate
from hybrid_rlhf.engine.train.deepspeed_compat import is_partitioned
from hybrid_rlhf.models import shared_prefix
from hybrid_rlhf.roles.policy_module import PolicyModule, TokenScores
from hybrid_rlhf.rollout import Rollout


def score(engine: HybridEngine, batch: SequenceBatch, max_tokens: int, score_fn: Callable) -> Iterator[tuple]:
    """(row indices, score_fn(rows on the engine's device)) of micro-batches within the token budget, in eval mode."""
    yield from score_index(engine, batch, max_tokens, lambda index: score_fn(batch.rows(index).to(engine.device)))


def score_index(engine: HybridEngine, batch: SequenceBatch, max_tokens: int, score_fn: Callable) -> Iterator[tuple]:
    """`score` with score_fn(row indices), for functions that need more than the rows."""
    engine.module.eval()
    with engine.active():
        yield from accumulate.score(engine, batch.attention_mask.sum(1), max_tokens, score_fn,
                                    prefix_groups(engine, batch))


def prefix_groups(engine: HybridEngine, batch: SequenceBatch) -> Tensor | None:
    """(B,) each row's group of rows with one prefix, if the module computes a shared prefix once; else None."""
    module = engine.module
    if not hasattr(module, "can_share") or not len(batch) or is_partitioned(module):
        return None
    with engine.active():
        can_share = module.can_share()  # packed rows share no prefix, but need it to separate documents
        return shared_prefix.prefix_groups(batch) if can_share and batch.position_ids is None else None


@torch.no_grad()
def per_action(engine: HybridEngine, rollout: Rollout, max_tokens: int, score_fn: Callable) -> Tensor:
    """`score_fn(rows)` -> one value per action, for the whole rollout as (B, R) fp32 on the CPU, zero elsewhere."""
    sequences = rollout.sequences(engine.pad_id)
    out = torch.zeros(rollout.action_mask.shape)
    for index, values in score(engine, sequences, max_tokens, score_fn):
        out[index] = scatter(values.float().cpu(), rollout.action_mask[index])
    return out


@torch.no_grad()
def per_sequence(engine: HybridEngine, batch: SequenceBatch, max_tokens: int) -> Tensor:
    """(B,) fp32 on the CPU: the summed log-probabilities of each row's loss tokens, without gradients."""
    out = torch.zeros(len(batch))
    for index, sums in score(engine, batch, max_tokens, lambda rows: summed(engine(rows), rows)):
        out[index] = sums.cpu()
    return out


@torch.no_grad()
def last_numbers(engine: HybridEngine, batch: SequenceBatch, max_tokens: int) -> Tensor:
    """(B,) fp32 on the CPU: a scalar model's output at each row's last real token, without gradients."""
    out = torch.zeros(len(batch))
    for index, numbers in score(engine, batch, max_tokens, lambda rows: at_last(engine(rows), rows)):
        out[index] = numbers.cpu()
    return out


def at_last(numbers: Tensor, rows: SequenceBatch) -> Tensor:
    """(B, T) -> (B,): each row's number at its last real token."""
    return numbers.gather(1, last_true(rows.attention_mask)[:, None])[:, 0]


def summed(tokens: TokenScores, rows: SequenceBatch) -> Tensor:
    """(B,): the log-probabilities of each row's loss tokens, added up."""
    return summed_by_row(tokens.logprobs, rows)


# -- The reference policy: the frozen model of the KL penalty ----------------------------------------------------------


@dataclass
class Reference:
    """The frozen policy of the KL penalty. `logprobs(rollout)` -> (B, R)."""

    engine: HybridEngine[PolicyModule]
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reference"

    def logprobs(self, rollout: Rollout) -> Tensor:
        return per_action(self.engine, rollout, self.max_tokens,
                          lambda rows: self.engine(rows, temperature=rollout.temperature).logprobs)

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's loss tokens, without gradients."""
        return per_sequence(self.engine, batch, self.max_tokens)
