"""The four roles as handles: what an algorithm may ask of a model, in the algorithm's own shapes.

A role is an engine and what it needs to turn records into the engine's input. Trainers hold roles and know neither
models nor engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_rlhf import role_state
from hybrid_rlhf.distributed import place_over_ranks, sum_over_ranks
from hybrid_rlhf.engine import HybridEngine, SamplingConfig, micro_batches
from hybrid_rlhf.engine.average import WeightAverage
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.models.shared_prefix import kinship
from hybrid_rlhf.policy import PolicyModule, TokenScores
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.routing import expert_shares
from hybrid_rlhf.tensors import SequenceBatch, last_true, pad_right, predicting, scatter

__all__ = ["Actor", "Critic", "Mixed", "PolicyModule", "Reference", "Reward", "Roles", "TokenScores", "WeightAverage"]


def _measure(engine: HybridEngine, batch: SequenceBatch, max_tokens: int, numbers: Callable) -> Iterator[tuple]:
    """(row indices, numbers(rows on the engine's device)) of micro-batches within the token budget, in eval mode."""
    engine.module.eval()
    with engine.active():
        yield from micro_batches.measure(engine, batch.attention_mask.sum(1), max_tokens,
                                         lambda index: numbers(batch.rows(index).to(engine.device)),
                                         _kin(engine, batch))


def _kin(engine: HybridEngine, batch: SequenceBatch) -> Tensor | None:
    """The number of each row's kin where rows begin alike and the module computes that once; None elsewhere."""
    module = engine.module
    if not hasattr(module, "can_share") or not len(batch) or batch.position_ids is not None:
        return None
    with engine.active():
        return kinship(batch) if module.can_share() else None


@torch.no_grad()
def _per_action(engine: HybridEngine, rollout: Rollout, max_tokens: int, numbers: Callable) -> Tensor:
    """`numbers(rows)` -> one value per action, for the whole rollout as (B, R) fp32 on the CPU, zero at padding."""
    sequences = rollout.sequences(engine.pad_id)
    out = torch.zeros(rollout.action_mask.shape)
    for index, found in _measure(engine, sequences, max_tokens, numbers):
        out[index] = scatter(found.float().cpu(), rollout.action_mask[index])
    return out


@torch.no_grad()
def _per_sequence(engine: HybridEngine, batch: SequenceBatch, max_tokens: int) -> Tensor:
    """(B,) fp32 on the CPU: the summed log-probabilities of each row's marked tokens, without gradients."""
    out = torch.zeros(len(batch))
    for index, found in _measure(engine, batch, max_tokens, lambda rows: _summed(engine(rows), rows)):
        out[index] = found.cpu()
    return out


def _summed(tokens: TokenScores, rows: SequenceBatch) -> Tensor:
    """(B,): the log-probabilities of each row's marked tokens, added up."""
    return scatter(tokens.logprobs, rows.loss_mask[:, 1:]).sum(1)


@dataclass
class Reference:
    """The policy that the actor is held near to. `logprobs(rollout)` -> (B, R)."""

    engine: HybridEngine
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reference"

    def logprobs(self, rollout: Rollout) -> Tensor:
        return _per_action(self.engine, rollout, self.max_tokens, lambda rows: self.engine(rows).logprobs)

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's marked tokens, without gradients."""
        return _per_sequence(self.engine, batch, self.max_tokens)


class Mixed(NamedTuple):
    """Rows of another stream in an actor's optimizer step, at temperature 1: `weight` times the sum of
    `loss(TokenScores, their token count over all ranks)`."""

    batch: SequenceBatch
    loss: Callable
    weight: float


@dataclass
class Actor:
    """The policy: samples, is measured, is updated. tokenizer decodes what was sampled, for people and sources."""

    engine: HybridEngine
    tokenizer: object
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "actor"

    @contextmanager
    def inference(self) -> Iterator[None]:
        with self.engine.inference():
            yield

    def generate(self, prompts: Prompts, sampling: SamplingConfig, seed: int) -> Rollout:
        """One response to each prompt (repeat them for groups). Inside `inference()` only.

        Prompts are numbered over all processes: what is drawn does not depend on how many share them.
        """
        first, _ = place_over_ranks(len(prompts))
        numbers = range(first, first + len(prompts))
        generation = self.engine.generate(prompts.ids, sampling, seed, numbers=numbers)
        ended = [reason == "eos" for reason in generation.finish_reasons]
        texts = self.tokenizer.batch_decode(
            [row[: len(row) - int(end)] for row, end in zip(generation.tokens, ended, strict=True)],
            skip_special_tokens=True)
        rollout = Rollout.from_responses(prompts, generation.tokens, ended, self.engine.pad_id, texts)
        rollout.sampled_logprobs = pad_right(generation.logprobs, 0.0, torch.float32)
        return rollout

    def logprobs(self, rollout: Rollout) -> Tensor:
        """(B, R) log-probabilities of the sampled tokens under the present weights."""
        return _per_action(self.engine, rollout, self.max_tokens, lambda rows: self.engine(rows).logprobs)

    def update(self, minibatch: Rollout, loss: Callable, mixed: Mixed | None = None) -> Metrics:
        """One optimizer step. `loss(TokenScores, rows of the minibatch, action count over all ranks)`."""
        batch, count = minibatch.sequences(self.engine.pad_id), sum_over_ranks(minibatch.action_mask.sum())

        def micro(tokens: TokenScores, index: Tensor) -> tuple[Tensor, dict]:
            return loss(tokens, minibatch.rows(index).to(self.engine.device), count)

        parts = [self._part(batch, micro, with_entropy=True)]
        if mixed is not None:
            size = sum_over_ranks(mixed.batch.loss_mask[:, 1:].sum())
            parts.append(self._part(mixed.batch, lambda tokens, _: mixed.loss(tokens, size), mixed.weight,
                                    temperature=1.0))
        return micro_batches.update(self.engine, self.max_tokens, *parts)

    def fit_tokens(self, batch: SequenceBatch, loss: Callable) -> Metrics:
        """One optimizer step on the marked tokens. `loss(TokenScores, token count over all ranks)`."""
        count = sum_over_ranks(batch.loss_mask[:, 1:].sum())
        return micro_batches.update(self.engine, self.max_tokens,
                                    self._part(batch, lambda tokens, _: loss(tokens, count)))

    def _part(self, batch: SequenceBatch, loss: Callable, weight: float = 1.0, **options: float) -> micro_batches.Part:
        """The rows of `batch` and `weight` times `loss(TokenScores, index)` with, for experts, the router's loss of the
        same rows."""
        total = sum_over_ranks(batch.attention_mask.sum())
        shares = expert_shares(self.engine, batch, self.max_tokens)

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(index).to(self.engine.device)
            tokens = self.engine(rows, expert_shares=shares(len(rows)), **options)
            value, observed = self._with_router(*loss(tokens, index), tokens, rows, total)
            return weight * value, observed

        return micro_batches.Part(batch.attention_mask.sum(1), share, _kin(self.engine, batch))

    def _with_router(self, value: Tensor, observed: dict, tokens: TokenScores, rows: SequenceBatch,
                     total: Tensor) -> tuple[Tensor, dict]:
        """A share of the loss with these rows' router loss, as a share of `total` real tokens, where there is one."""
        if tokens.router_loss is None:
            return value, observed
        size = rows.attention_mask.sum()
        return (value + self.engine.module.router.coefficient * tokens.router_loss * size / total.to(size.device),
                observed | {"aux_loss": (tokens.router_loss.detach(), size)})

    def fit_sequences(self, batch: SequenceBatch, groups: Tensor, loss: Callable) -> Metrics:
        """One optimizer step on whole responses. groups (G, k) long: rows that stay together, such as a pair's.

        `loss(logprobs (k, g), index of groups (g,))`: the summed log-probabilities of the marked tokens of each row.
        """
        widths = batch.attention_mask.sum(1)[groups].amax(1) * groups.shape[1]  # a group costs k rows of its longest
        total = sum_over_ranks(batch.attention_mask.sum())
        shares = expert_shares(self.engine, batch, self.max_tokens)
        _kin(self.engine, batch)  # tried before the first forward, so that a resumed run computes as the first one did

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(groups[index].T.reshape(-1)).to(self.engine.device)
            tokens = self.engine(rows, expert_shares=shares(len(rows)))
            found = loss(_summed(tokens, rows).view(-1, len(index)), index)
            return self._with_router(*found, tokens, rows, total)

        return micro_batches.update(self.engine, self.max_tokens, micro_batches.Part(widths, share))

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's marked tokens, without gradients."""
        return _per_sequence(self.engine, batch, self.max_tokens)

    def average(self, decay: float) -> WeightAverage:
        """A moving average of the trained weights, from now on."""
        return WeightAverage(self.engine, decay)

    @torch.no_grad()
    def score_tokens(self, batch: SequenceBatch, **options: float) -> Sequence[TokenScores]:
        """TokenScores of the marked tokens, micro-batch by micro-batch, without gradients. options: the module's."""
        return [found for _, found in _measure(self.engine, batch, self.max_tokens,
                                               lambda rows: self.engine(rows, **options))]


@dataclass
class Critic:
    """The value of each state: what the rest of the response will be paid."""

    engine: HybridEngine
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "critic"

    def values(self, rollout: Rollout) -> Tensor:
        """(B, R): the value before each action."""
        return _per_action(self.engine, rollout, self.max_tokens, lambda rows: predicting(self.engine(rows), rows))

    def update(self, minibatch: Rollout, loss: Callable) -> Metrics:
        """One optimizer step. `loss(new_values (N,), rows of the minibatch, action count over all ranks)`."""
        batch, count = minibatch.sequences(self.engine.pad_id), sum_over_ranks(minibatch.action_mask.sum())

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(index).to(self.engine.device)
            return loss(predicting(self.engine(rows), rows), minibatch.rows(index).to(self.engine.device), count)

        return micro_batches.update(self.engine, self.max_tokens, micro_batches.Part(
            batch.attention_mask.sum(1), share, _kin(self.engine, batch)))


@dataclass
class Reward:
    """A reward model: one score per sequence, read at its last real token."""

    engine: HybridEngine
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reward model"

    @torch.no_grad()
    def score(self, batch: SequenceBatch) -> Tensor:
        """(B,) fp32 scores on the CPU, without gradients."""
        out = torch.zeros(len(batch))
        for index, found in _measure(self.engine, batch, self.max_tokens, lambda rows: _last(self.engine(rows), rows)):
            out[index] = found.cpu()
        return out

    def score_rollout(self, rollout: Rollout) -> Tensor:
        """(B,) scores of prompt and response together."""
        return self.score(rollout.sequences(self.engine.pad_id))

    def update(self, batch: SequenceBatch, pairs: Tensor, loss: Callable) -> Metrics:
        """One optimizer step on pairs. pairs (P, 2) long: rows of chosen and rejected.

        A pair is never torn apart: micro-batches are made of pairs. `loss(chosen (p,), rejected (p,), index of pairs)`.
        """
        lengths, kin = batch.attention_mask.sum(1), _kin(self.engine, batch)
        widths = lengths[pairs].amax(1) * 2  # a pair costs two rows of its longer side

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(pairs[index].T.reshape(-1)).to(self.engine.device)
            return loss(*_last(self.engine(rows), rows).chunk(2), index)

        return micro_batches.update(self.engine, self.max_tokens, micro_batches.Part(
            widths, share, None if kin is None else kin[pairs[:, 0]]))


def _last(scores: Tensor, rows: SequenceBatch) -> Tensor:
    """(B, T) -> (B,): each row's number at its last real token."""
    return scores.gather(1, last_true(rows.attention_mask)[:, None])[:, 0]


@dataclass
class Roles:
    """The models of an on-policy method; ref and critic are None where the method has no use for them."""

    actor: Actor
    ref: Reference | None = None
    critic: Critic | None = None

    def learnt(self) -> dict[str, dict[str, int]]:
        """What running out of memory taught each role's engine: part of a checkpoint, for it moves the rounding."""
        return {name: dict(role.engine.learnt) for name, role in vars(self).items() if role}

    def state(self) -> dict:
        """For a checkpoint: what is trained of each role, under its name, and `learnt`. Tensors are no copies."""
        return role_state.states(vars(self)) | {"learnt": self.learnt()}

    def load_state(self, state: Mapping) -> None:
        """Go on where `state` was taken (other keys are left alone); ValueError where it is of other weights."""
        role_state.load_states(vars(self), state)
