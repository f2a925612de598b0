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
from hybrid_rlhf.measuring import kin, measure, per_action, per_sequence, summed
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.policy import PolicyModule, TokenScores
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.routing import expert_shares
from hybrid_rlhf.scalar_roles import Critic, Reward
from hybrid_rlhf.tensors import SequenceBatch, pad_right

__all__ = ["Actor", "Critic", "Mixed", "PolicyModule", "Reference", "Reward", "Roles", "TokenScores", "WeightAverage"]


@dataclass
class Reference:
    """The policy that the actor is held near to. `logprobs(rollout)` -> (B, R)."""

    engine: HybridEngine
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        self.engine.name = "reference"

    def logprobs(self, rollout: Rollout) -> Tensor:
        return per_action(self.engine, rollout, self.max_tokens, lambda rows: self.engine(rows).logprobs)

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's marked tokens, without gradients."""
        return per_sequence(self.engine, batch, self.max_tokens)


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
        return per_action(self.engine, rollout, self.max_tokens, lambda rows: self.engine(rows).logprobs)

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

        return micro_batches.Part(batch.attention_mask.sum(1), share, kin(self.engine, batch))

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
        kin(self.engine, batch)  # tried before the first forward, so that a resumed run computes as the first one did

        def share(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(groups[index].T.reshape(-1)).to(self.engine.device)
            tokens = self.engine(rows, expert_shares=shares(len(rows)))
            found = loss(summed(tokens, rows).view(-1, len(index)), index)
            return self._with_router(*found, tokens, rows, total)

        return micro_batches.update(self.engine, self.max_tokens, micro_batches.Part(widths, share))

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's marked tokens, without gradients."""
        return per_sequence(self.engine, batch, self.max_tokens)

    def average(self, decay: float) -> WeightAverage:
        """A moving average of the trained weights, from now on."""
        return WeightAverage(self.engine, decay)

    @torch.no_grad()
    def score_tokens(self, batch: SequenceBatch, **options: float) -> Sequence[TokenScores]:
        """TokenScores of the marked tokens, micro-batch by micro-batch, without gradients. options: the module's."""
        return [found for _, found in measure(self.engine, batch, self.max_tokens,
                                               lambda rows: self.engine(rows, **options))]


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
        """For a checkpoint: what is trained of each role, under its name, `learnt`, and the scale of a new critic's
        values. Tensors are no copies."""
        scale = {"value_scale": [self.critic.mean, self.critic.std]} if self.critic and self.critic.is_new else {}
        return role_state.states(vars(self)) | {"learnt": self.learnt()} | scale

    def load_state(self, state: Mapping) -> None:
        """Go on where `state` was taken (other keys are left alone); ValueError where it is of other weights."""
        role_state.load_states(vars(self), state)
        if self.critic and self.critic.is_new:
            self.critic.set_scale(*state["value_scale"])
