"""Stage 3: proximal policy optimisation (1707.06347) with a KL price to the reference (1909.08593, 2203.02155)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.advantages import ESTIMATORS, explained_variance, whiten
from hybrid_rlhf.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate
from hybrid_rlhf.algorithms.policy import policy_loss, value_loss
from hybrid_rlhf.algorithms.shaping import missing_eos, normalise, shape_rewards
from hybrid_rlhf.collect import OLD_LOGPROBS, DriftGate, SamplingConfig, collect
from hybrid_rlhf.config import check, nearest
from hybrid_rlhf.distributed import place_over_ranks, sum_over_ranks
from hybrid_rlhf.metrics import Metrics
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.roles import Roles, TokenScores
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.tensors import masked_mean


@dataclass(frozen=True)
class PPOConfig:
    """PPO's own settings.

    Attributes:
        sampling: How responses are drawn.
        num_ppo_epochs: Passes over each rollout.
        num_minibatches: Optimizer steps per pass.
        minibatch_size: Sequences per optimizer step, over all processes; overrides num_minibatches.
        kl_coef: Price of one nat of KL to the reference (the start value, if adaptive).
        kl_estimator: k1, k2 or k3.
        kl_target: Nats per sequence that an adaptive kl_coef aims at; None keeps kl_coef fixed.
        kl_horizon: Sequences over which the adaptive coefficient moves.
        cliprange: Clip range of the probability ratio.
        cliprange_value: Clip range of the value's move.
        vf_coef: Factor of the value loss.
        gamma: Discount.
        lam: GAE's lambda.
        estimator: Advantage estimator.
        whiten_advantages: Whether advantages get mean 0 and variance 1 over the rollout.
        normalise_scores: Whether scores are put on the scale (mean 0, std 1) that stage 2 measured on SFT responses.
        score_clip: Bound of the normalised score.
        missing_eos_penalty: Subtracted from the score of a response that did not end by itself.
        old_logprobs: Whose log-probabilities the ratio starts from: the sampler's, recompute (a training forward), or
            auto (the sampler's while their drift stays within max_logprob_drift).
        max_logprob_drift: Mean |sampled - training| log-probability, in nats, that auto accepts.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_ppo_epochs: int = 4
    num_minibatches: int = 1
    minibatch_size: int | None = None
    kl_coef: float = 0.05
    kl_estimator: str = "k1"
    kl_target: float | None = None
    kl_horizon: int = 10000
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 1.0
    gamma: float = 1.0
    lam: float = 0.95
    estimator: str = "gae"
    whiten_advantages: bool = True
    normalise_scores: bool = True
    score_clip: float | None = 5.0
    missing_eos_penalty: float = 0.0
    old_logprobs: str = "auto"
    max_logprob_drift: float = 0.02

    def __post_init__(self) -> None:
        check(self.estimator in ESTIMATORS, f"ppo.estimator is {self.estimator!r}; there are {', '.join(ESTIMATORS)}"
                                            f"{nearest(self.estimator, ESTIMATORS)}")
        check(self.old_logprobs in OLD_LOGPROBS,
              f"ppo.old_logprobs is {self.old_logprobs!r}; choose {', '.join(OLD_LOGPROBS)}"
              f"{nearest(self.old_logprobs, OLD_LOGPROBS)}")
        check(self.kl_estimator in ("k1", "k2", "k3"), f"ppo.kl_estimator is {self.kl_estimator!r}; choose k1, k2, k3")
        for name in ("num_ppo_epochs", "num_minibatches"):
            check(getattr(self, name) >= 1, f"ppo.{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("gamma", "lam"):
            check(0 <= getattr(self, name) <= 1, f"ppo.{name} is {getattr(self, name)}; it must lie in [0, 1]")
        for name in ("cliprange", "cliprange_value"):
            check(getattr(self, name) > 0, f"ppo.{name} is {getattr(self, name)}; it must be positive")
        check(self.kl_coef >= 0, f"ppo.kl_coef is {self.kl_coef}; it must not be negative")
        check(self.kl_target is None or self.kl_target > 0,
              f"ppo.kl_target is {self.kl_target}; it must be positive (nats per sequence) or null")
        check(self.kl_horizon > 0, f"ppo.kl_horizon is {self.kl_horizon}; it must be positive (sequences)")
        check(self.minibatch_size is None or self.minibatch_size >= 1,
              f"ppo.minibatch_size is {self.minibatch_size}; it must be at least 1")


class PPOTrainer:
    """One step: sample, estimate advantages once, update actor and critic for some epochs.

    score_mean, score_std: the score statistics of stage 2, used when config.normalise_scores.
    """

    progress_keys = ("reward", "kl", "completions/mean_length", "entropy", "policy/clip_fraction")

    def __init__(self, roles: Roles, source: RewardSource, config: PPOConfig, *, seed: int, score_mean: float = 0.0,
                 score_std: float = 1.0) -> None:
        self.roles, self.source, self.config, self.seed = roles, source, config, seed
        self.score_mean, self.score_std = score_mean, score_std
        self.estimator = ESTIMATORS[config.estimator].fn
        self.kl_coef = FixedKL(config.kl_coef) if config.kl_target is None else AdaptiveKL(
            config.kl_coef, config.kl_target, config.kl_horizon)
        self.rng = torch.Generator().manual_seed(seed)
        self.gate = DriftGate(config.old_logprobs, config.max_logprob_drift)
        self.num_steps = 0
        self.newest: Rollout | None = None

    def step(self, prompts: Prompts) -> Metrics:
        metrics = Metrics()
        rollout = collect(prompts, self.roles, self.source, self.config.sampling, self._sampling_seed(), metrics,
                          self.gate)
        self.estimate(rollout, metrics)
        with metrics.timer("train"):
            updated = self.update(rollout)
        metrics.add("kl_coef", self.kl_coef.value)
        self.kl_coef.update(*_mean_over_ranks(rollout.mean_kl(), len(rollout)))
        self.num_steps += 1
        self.newest = rollout
        return metrics + updated + rollout.metrics()

    @torch.no_grad()
    def estimate(self, rollout: Rollout, metrics: Metrics) -> None:
        """Fill in rewards, advantages and returns, once per rollout."""
        config, mask = self.config, rollout.action_mask
        kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, config.kl_estimator)
        rollout.rewards = shape_rewards(self._paid_scores(rollout), kl, self.kl_coef.value, mask)
        rollout.advantages, rollout.returns = self.estimator(
            rollout.rewards, mask, values=rollout.values, group_size=config.sampling.num_samples,
            gamma=config.gamma, lam=config.lam, reduce=sum_over_ranks)
        if config.whiten_advantages:
            rollout.advantages = whiten(rollout.advantages, mask, reduce=sum_over_ranks)
        metrics.add("value/explained_variance", explained_variance(rollout.values, rollout.returns, mask,
                                                                      reduce=sum_over_ranks))
        metrics.add("value/mean", masked_mean(rollout.values, mask), mask.sum())
        price = -self.kl_coef.value * kl.masked_fill(~mask, 0).sum(1)
        metrics.add("objective/non_score_reward", price.mean(), len(rollout))

    def _paid_scores(self, rollout: Rollout) -> Tensor:
        """Scores on the scale of stage 2's statistics, clipped, less the price of not ending."""
        scores = rollout.scores
        if self.config.normalise_scores:
            scores = normalise(scores, self.score_mean, self.score_std)
        if self.config.score_clip is not None:
            scores = scores.clamp(-self.config.score_clip, self.config.score_clip)
        return missing_eos(scores, rollout.has_eos, self.config.missing_eos_penalty)

    def update(self, rollout: Rollout) -> Metrics:
        """num_ppo_epochs passes over the rollout in shuffled minibatches: the actor's step, then the critic's.

        The order is one of all processes' sequences, so that how many processes share them moves no gradient.
        """
        metrics, (first, total) = Metrics(), place_over_ranks(len(rollout))
        for _ in range(self.config.num_ppo_epochs):
            for minibatch in rollout.shuffled(self._minibatch_size(total), self.rng, first, total):
                actor = self.roles.actor.update(minibatch, self.actor_loss)
                critic = self.roles.critic.update(minibatch, self.critic_loss)
                metrics = metrics + actor + critic.renamed(
                    {n: f"value/{n}" for n in ("grad_norm", "learning_rate", "micro_batch_tokens")})
        return metrics

    def _minibatch_size(self, num_sequences: int) -> int:
        return self.config.minibatch_size or -(-num_sequences // self.config.num_minibatches)

    def actor_loss(self, tokens: TokenScores, rows: Rollout, count: Tensor) -> tuple[Tensor, dict]:
        """Clipped surrogate of these rows as a share of `count` actions, and what to report."""
        mask = rows.action_mask
        loss, observed = policy_loss(tokens.logprobs, rows.logprobs[mask], rows.advantages[mask],
                                     cliprange=(self.config.cliprange, self.config.cliprange), denominator=count)
        size = int(mask.sum())
        if tokens.entropy is not None:
            observed["entropy"] = (tokens.entropy.detach().mean(), size)
        return loss, observed

    def critic_loss(self, new_values: Tensor, rows: Rollout, count: Tensor) -> tuple[Tensor, dict]:
        """Clipped value loss of these rows as a share of `count` actions, and what to report."""
        mask = rows.action_mask
        loss, observed = value_loss(new_values, rows.values[mask], rows.returns[mask],
                                    cliprange_value=self.config.cliprange_value, denominator=count)
        return self.config.vf_coef * loss, observed

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        metrics = Metrics()
        for i, prompts in enumerate(batches):
            rollout = collect(prompts, self.roles, self.source, self.config.sampling, self.seed + i, Metrics())
            metrics += rollout.metrics()
        return metrics.over_ranks()

    def _sampling_seed(self) -> int:
        """A seed of its own for every step, so that resuming at a step draws what that step would have drawn."""
        return self.seed * 1_000_003 + self.num_steps

    def samples(self, count: int = 4) -> list[dict]:
        """The first responses of the newest rollout, for people."""
        if self.newest is None:
            return []
        newest = self.newest
        return [{"prompt": newest.prompts.texts[i], "completion": newest.completions[i],
                 "score": float(newest.scores[i]), "ended": bool(newest.has_eos[i])}
                for i in range(min(count, len(newest)))]

    def state(self) -> dict:
        state = {"actor": self.roles.actor.engine.training.state(), "kl_coef": self.kl_coef.state(),
                 "num_steps": self.num_steps, "rng": self.rng.get_state()}
        if self.roles.critic:
            state["critic"] = self.roles.critic.engine.training.state()
        return state | {"learnt": self.roles.learnt()}


def _mean_over_ranks(mean: float, count: int) -> tuple[float, int]:
    """The mean over the observations of all processes (this one has `count`), and their number."""
    total, number = sum_over_ranks(torch.tensor([mean * count, count], dtype=torch.float64)).tolist()
    return total / max(number, 1), int(number)
