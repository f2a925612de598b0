"""Rejection sampling (RAFT, 2304.06767; Llama 2, 2307.09288, section 3.2.3): rounds of best-of-n sampling and SFT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.likelihood import imitation_loss
from hybrid_rlhf.algorithms.preference import best_and_worst, best_at_least
from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import place_over_ranks
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.roles import Roles, TokenScores
from hybrid_rlhf.roles.role_state import schedule_at
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.best_of_n import BestOfNSampler


@dataclass(frozen=True)
class RejectionConfig:
    """Settings of rejection sampling. A trainer step is one round: sample, choose, imitate.

    Attributes:
        sampling: How responses are drawn; of num_samples responses to a prompt the best one is imitated.
        min_score: Only responses with at least this score are imitated (1 for answers that a function scores as right);
            null takes the best of every prompt whose responses' scores differ.
        num_epochs: Passes over the chosen responses of a round.
        num_minibatches: Optimizer steps per pass.
        missing_eos_penalty: Subtracted from the score of a response that did not end by itself.
        measure_kl: Whether the KL to the start is reported, which needs a reference model (with LoRA: the base).
    """

    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(num_samples=8))
    min_score: float | None = None
    num_epochs: int = within(1, "[1,")
    num_minibatches: int = within(1, "[1,")
    missing_eos_penalty: float = within(0.0, "[0,")
    measure_kl: bool = True

    def __post_init__(self) -> None:
        check_values(self, "rejection.")
        size = self.sampling.num_samples
        check(size >= 2 or self.min_score is not None,
              f"rejection.sampling.num_samples is {size}, and of one response none is the best; give 2 or more, or "
              "rejection.min_score")
        self.sampling.check_groups("rejection")


class RejectionTrainer:
    """One step: sample, keep the best response to each prompt, and SFT on those.

    Ties go to the first response. Responses that every source skipped are never chosen.
    """

    progress_keys = ("reward", "rejection/chosen_score", "loss", "kl", "completions/mean_length")

    def __init__(self, roles: Roles, source: RewardSource, config: RejectionConfig, *, seed: int) -> None:
        self.roles, self.config = roles, config
        self.sampler = BestOfNSampler(roles, source, config.sampling, seed, config.missing_eos_penalty)
        self.rng = torch.Generator().manual_seed(seed)

    def step(self, prompts: Prompts) -> Metrics:
        metrics, config = Metrics(), self.config
        # as planned, even if a round chose nothing, or too few for all of its minibatches
        schedule_at(self.roles.actor, self.sampler.num_steps * config.num_epochs * config.num_minibatches)
        rollout, scores = self.sampler.sample(prompts, metrics)
        chosen = self._chosen(scores)
        metrics.add("rejection/kept", len(chosen) / max(len(prompts), 1), len(prompts))
        metrics.add("rejection/chosen_score", scores[chosen].mean(), len(chosen))
        with metrics.timer("train"):
            learned = self._imitate(rollout.rows(chosen))
        return metrics + learned + rollout.metrics()

    def _chosen(self, scores: Tensor) -> Tensor:
        """The rows to imitate, at most one for each prompt."""
        size, bar = self.config.sampling.num_samples, self.config.min_score
        return best_and_worst(scores, size)[0] if bar is None else best_at_least(scores, size, bar)

    def _imitate(self, chosen: Rollout) -> Metrics:
        """num_epochs passes over the chosen responses of all processes, in shuffled minibatches."""
        metrics, (first, total) = Metrics(), place_over_ranks(len(chosen))
        for _ in activity.epochs(self.config.num_epochs if total else 0):
            for minibatch in chosen.shuffled(-(-total // self.config.num_minibatches), self.rng, first, total):
                batch = minibatch.sequences(self.roles.actor.engine.pad_id)
                metrics += self.roles.actor.fit_tokens(batch, _loss)
        return metrics

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        return self.sampler.evaluate(batches)

    def samples(self) -> list[dict]:
        return self.sampler.samples()

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        return self.sampler.state() | {"rng": self.rng.get_state()}

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        self.sampler.load_state(state)
        self.rng.set_state(state["rng"])


def _loss(tokens: TokenScores, count: Tensor) -> tuple[Tensor, dict]:
    return imitation_loss(tokens.logprobs, tokens.correct, denominator=count)
