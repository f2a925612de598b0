"""The actor: the policy that is sampled and trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.divergence import TeacherTargets
from hybrid_rlhf.core.distributed import place_over_ranks, sum_over_ranks
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import KeptSets, SequenceBatch, pad_right, to_device
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.engine.train.ema import WeightAverage
from hybrid_rlhf.models.tokenizer import Tokenizer, completion_text
from hybrid_rlhf.roles.policy_module import PolicyModule, TokenScores
from hybrid_rlhf.roles.router_balance import expert_shares
from hybrid_rlhf.roles.scoring import per_action, per_sequence, prefix_groups, score_index, summed
from hybrid_rlhf.rollout import Prompts, Rollout


class AuxiliaryLoss(NamedTuple):
    """An extra loss in an actor's optimizer step, on rows of another stream, at temperature 1: `weight` times the sum
    of `loss_fn(TokenScores, their token count over all ranks)`."""

    batch: SequenceBatch
    loss_fn: Callable
    weight: float


class Player(Protocol):
    """Samples episodes of several turns (rollout/episodes.py)."""

    def play(self, engine: HybridEngine, prompts: Prompts, sampling: SamplingConfig, seed: int,
             numbers: Sequence[int], keep_candidates: bool = False) -> Rollout: ...


@dataclass
class Actor:
    """The trained policy: it samples, scores and is updated. tokenizer decodes the responses, for people and reward
    sources. episodes: samples responses of several turns, if there are any."""

    engine: HybridEngine[PolicyModule]
    tokenizer: Tokenizer
    max_tokens: int = 8192
    episodes: Player | None = None

    def __post_init__(self) -> None:
        self.engine.name = "actor"

    @contextmanager
    def inference(self) -> Iterator[None]:
        with self.engine.inference():
            yield

    def resident(self) -> AbstractContextManager:
        """Keep an offloaded actor on the device for the block, so that several uses move it once."""
        return self.engine.resident()

    def generate(self, prompts: Prompts, sampling: SamplingConfig, seed: int,
                 keep_candidates: bool = False) -> Rollout:
        """One response to each prompt (repeat them for groups). Inside `inference()` only.

        keep_candidates: whether the rollout gets the candidate tokens of truncated sampling, over which all
        log-probabilities of these responses are then normalised.
        Prompts are numbered over all processes, so that the draws do not depend on the number of processes.
        """
        first, _ = place_over_ranks(len(prompts))
        numbers = range(first, first + len(prompts))
        if self.episodes is not None:
            return self.episodes.play(self.engine, prompts, sampling, seed, numbers, keep_candidates)
        generation = self.engine.generate(prompts.ids, sampling, seed, numbers=numbers,
                                          keep_candidates=keep_candidates, images=prompts.images)
        ended = [reason == "eos" for reason in generation.finish_reasons]
        texts = [completion_text(self.tokenizer, *row) for row in zip(generation.tokens, ended, strict=True)]
        rollout = Rollout.from_responses(prompts, generation.tokens, ended, self.engine.pad_id, texts)
        rollout.sampled_logprobs = pad_right(generation.logprobs, 0.0, torch.float32)
        rollout.kept = None if generation.kept is None else KeptSets.of_rows(generation.kept)
        rollout.temperature = float(sampling.temperature) or 1.0  # greedy samples are scored at temperature 1
        return rollout

    def logprobs(self, rollout: Rollout) -> Tensor:
        """(B, R) log-probabilities of the sampled tokens under the current weights, at the rollout's temperature."""
        return per_action(self.engine, rollout, self.max_tokens,
                          lambda rows: self.engine(rows, temperature=rollout.temperature).logprobs)

    def update(self, minibatch: Rollout, loss_fn: Callable, auxiliary: AuxiliaryLoss | None = None,
               teacher: TeacherTargets | None = None) -> Metrics:
        """One optimizer step. loss_fn(TokenScores, rows of the minibatch, its Totals) -> their share of the loss, and
        {metric: (mean, weight)}. teacher: of the minibatch's actions; the scores then include the divergence."""
        totals = minibatch.totals()

        def loss_on_rows(scores: TokenScores, index: Tensor) -> tuple[Tensor, dict]:
            return loss_fn(scores, minibatch.rows(index).to(self.engine.device), totals)

        with self.resident():
            rows = [self._rows(minibatch.sequences(self.engine.pad_id), loss_on_rows, teacher=teacher,
                               with_entropy=True, temperature=minibatch.temperature)]
            if auxiliary is not None:
                num_tokens = sum_over_ranks(auxiliary.batch.loss_mask[:, 1:].sum())
                rows.append(self._rows(auxiliary.batch, lambda scores, _: auxiliary.loss_fn(scores, num_tokens),
                                       auxiliary.weight))
            return accumulate(self.engine, self.max_tokens, *rows)

    def fit_tokens(self, batch: SequenceBatch, loss_fn: Callable, teacher: TeacherTargets | None = None) -> Metrics:
        """One optimizer step on the loss tokens. `loss_fn(TokenScores, token count over all ranks)`. teacher: of these
        tokens; the scores then include the divergence."""
        num_tokens = sum_over_ranks(batch.loss_mask[:, 1:].sum())
        with self.resident():
            rows = self._rows(batch, lambda scores, _: loss_fn(scores, num_tokens), teacher=teacher)
            return accumulate(self.engine, self.max_tokens, rows)

    def _rows(self, batch: SequenceBatch, loss_fn: Callable, weight: float = 1.0,
              teacher: TeacherTargets | None = None, **options: float) -> Rows:
        """The rows of `batch` with `weight` times `loss_fn(TokenScores, index)` and, for experts, the router's loss of
        the same rows."""
        num_tokens = sum_over_ranks(batch.attention_mask.sum())
        shares = expert_shares(self.engine, batch, self.max_tokens)

        def micro_batch_loss(index: Tensor) -> tuple[Tensor, dict]:
            rows = batch.rows(index).to(self.engine.device)
            scores = self.engine(rows, expert_shares=shares(len(rows)), **options, **self._taught(teacher, index))
            loss, observed = loss_fn(scores, index)
            loss, observed = self._with_router_loss(loss, observed, scores, rows, num_tokens)
            return weight * loss, observed

        return Rows(batch.attention_mask.sum(1), micro_batch_loss, prefix_groups(self.engine, batch))

    def _taught(self, teacher: TeacherTargets | None, index: Tensor) -> dict[str, TeacherTargets]:
        """The module's keyword for the teacher's targets of the rows `index`."""
        return {} if teacher is None else {"teacher": teacher.select(index).to(self.engine.device)}

    def _with_router_loss(self, loss: Tensor, observed: dict, scores: TokenScores, rows: SequenceBatch,
                          num_tokens: Tensor) -> tuple[Tensor, dict]:
        """The loss plus these rows' router loss, if there is one, weighted by their share of num_tokens real tokens."""
        if scores.router_loss is None:
            return loss, observed
        size = rows.attention_mask.sum()
        share = scores.router_loss * size / to_device(num_tokens, size.device)
        return (loss + present(self.engine.module.router, "the router").coefficient * share,
                observed | {"aux_loss": (scores.router_loss.detach(), size)})

    def fit_sequences(self, batch: SequenceBatch, groups: Tensor, loss_fn: Callable) -> Metrics:
        """One optimizer step on whole responses. groups (G, k) long: rows that stay together, such as those of a pair.

        `loss_fn(logprobs (k, g), index of groups (g,))`: the summed log-probabilities of the loss tokens of each row.
        """
        lengths = batch.attention_mask.sum(1)[groups].amax(1) * groups.shape[1]  # a group costs k rows of its longest
        num_tokens = sum_over_ranks(batch.attention_mask.sum())
        with self.resident():
            shares = expert_shares(self.engine, batch, self.max_tokens)
            prefix_groups(self.engine, batch)  # tried before the first forward, as in a resumed run

            def micro_batch_loss(index: Tensor) -> tuple[Tensor, dict]:
                rows = batch.rows(groups[index].T.reshape(-1)).to(self.engine.device)
                scores = self.engine(rows, expert_shares=shares(len(rows)))
                loss, observed = loss_fn(summed(scores, rows).view(-1, len(index)), index)
                return self._with_router_loss(loss, observed, scores, rows, num_tokens)

            return accumulate(self.engine, self.max_tokens, Rows(lengths, micro_batch_loss))

    def sequence_logprobs(self, batch: SequenceBatch) -> Tensor:
        """(B,): the summed log-probabilities of each row's loss tokens, without gradients."""
        return per_sequence(self.engine, batch, self.max_tokens)

    def average(self, decay: float) -> WeightAverage:
        """An exponential moving average of the trained weights, from now on."""
        return WeightAverage(self.engine, decay)

    @torch.no_grad()
    def score_tokens(self, batch: SequenceBatch, teacher: TeacherTargets | None = None,
                     **options: float) -> Sequence[TokenScores]:
        """TokenScores of the loss tokens, micro-batch by micro-batch, without gradients. teacher: of these tokens;
        options: the module's."""

        def scores_of(index: Tensor) -> TokenScores:
            rows = batch.rows(index).to(self.engine.device)
            return self.engine(rows, **options, **self._taught(teacher, index))

        return [scores for _, scores in score_index(self.engine, batch, self.max_tokens, scores_of)]
