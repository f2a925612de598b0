"""Online DPO (2402.04792): offline losses on pairs of the policy's own samples, ranked by a reward source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.preference import best_and_worst
from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import sum_over_ranks
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.options import check_values, within
from hybrid_rlhf.data.collate import LabelledBatch, PairBatch, mismatches
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.roles import Roles
from hybrid_rlhf.roles.role_state import schedule_at
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.rollout.best_of_n import BestOfNSampler


@dataclass(frozen=True)
class OnlineConfig:
    """Settings of the pairs.

    Attributes:
        sampling: How responses are drawn; of num_samples responses to a prompt, the best and the worst are its pair.
        missing_eos_penalty: Subtracted from the score of a response that did not end by itself.
    """

    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(num_samples=2))
    missing_eos_penalty: float = within(0.0, "[0,")

    def __post_init__(self) -> None:
        check_values(self, "online.")
        check(self.sampling.num_samples >= 2, f"online.sampling.num_samples is {self.sampling.num_samples}; a pair is "
                                              "made of two responses or more")
        self.sampling.check_groups("online")


class PairLearner(Protocol):
    """A trainer on pairs: the offline trainer. start: the reference's log-probabilities of each row."""

    def step(self, batch: PairBatch | LabelledBatch, start: Tensor | None = None) -> Metrics: ...


class OnlinePreferenceTrainer:
    """One step: sample, let the source rank each prompt's responses, and one optimizer step on (best, worst).

    Groups whose scores are all equal give no pair. needs_pairs: whether the learner takes pairs, or labelled responses
    (kto): the best ones desirable, the worst ones undesirable.
    """

    progress_keys = ("reward", "kl", "rewards/accuracies", "completions/mean_length", "pairs/kept")

    def __init__(self, roles: Roles, source: RewardSource, learner: PairLearner, config: OnlineConfig, *, seed: int,
                 needs_pairs: bool = True) -> None:
        self.roles, self.learner, self.needs_pairs = roles, learner, needs_pairs
        self.sampler = BestOfNSampler(roles, source, config.sampling, seed, config.missing_eos_penalty)

    def step(self, prompts: Prompts) -> Metrics:
        metrics = Metrics()
        schedule_at(self.roles.actor, self.sampler.num_steps)  # one update a step, even without a pair
        rollout, scores = self.sampler.sample(prompts, metrics)
        best, worst = best_and_worst(scores, self.sampler.sampling.num_samples)
        metrics.add("pairs/kept", len(best) / max(len(prompts), 1), len(prompts))
        metrics.add("pairs/score_margin", (scores[best] - scores[worst]).mean(), len(best))
        if sum_over_ranks(torch.tensor(len(best))):  # else no process has a pair
            with metrics.timer("train"):
                learned = self.learner.step(*self._batch(rollout, best, worst))
            metrics += learned.renamed({"kl": "kto/kl"})  # kl is the samples'
        return metrics + rollout.metrics()

    def _batch(self, rollout: Rollout, best: Tensor, worst: Tensor) -> tuple[PairBatch | LabelledBatch, Tensor | None]:
        """A batch of the best rows, then the worst ones, and the reference's log-probabilities of each.

        The losses compare policy and reference at temperature 1: log-probabilities at another temperature cannot be
        used, and the learner computes them again (None).
        """
        pad_id, chosen = self.roles.actor.engine.pad_id, torch.cat([best, worst])
        rows = rollout.rows(chosen)
        sequences = rows.sequences(pad_id)
        start = None
        if rows.ref_logprobs is not None and rollout.temperature == 1:
            start = rows.ref_logprobs.masked_fill(~rows.action_mask, 0).sum(1)
        if self.needs_pairs:
            return PairBatch(sequences, torch.zeros(len(best))), start
        pairs = torch.tensor(mismatches(rollout.prompts.asked, chosen.tolist()), dtype=torch.long).view(-1, 2)
        response = ("response_ids", "response_mask", "action_mask")
        others = replace(rollout.rows(pairs[:, 0]), **{n: getattr(rollout, n)[pairs[:, 1]] for n in response})
        return LabelledBatch(sequences, others.sequences(pad_id), torch.arange(len(rows)) < len(best)), start

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        return self.sampler.evaluate(batches)

    def samples(self) -> list[dict]:
        return self.sampler.samples()

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        return self.sampler.state()

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        self.sampler.load_state(state)
