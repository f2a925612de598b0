"""Stage 3: proximal policy optimisation (1707.06347) with a KL penalty to the reference (1909.08593, 2203.02155).

Related methods without a critic are the same loop with another row of ESTIMATORS or POLICY_LOSSES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.advantages import ESTIMATORS, decoupled, explained_variance, whiten, whiten_responses
from hybrid_rlhf.algorithms.kl import AdaptiveKL, FixedKL, UpdateRate, kl_estimate, kl_loss
from hybrid_rlhf.algorithms.likelihood import imitation_loss
from hybrid_rlhf.algorithms.policy import (
    denominators,
    entropy_loss,
    importance_weights,
    kl_ratio,
    near_sampler,
    policy_loss,
    sequences_within,
    value_loss,
)
from hybrid_rlhf.algorithms.shaping import missing_eos, overlong, shape_rewards
from hybrid_rlhf.core import activity
from hybrid_rlhf.core.distributed import gather_over_ranks, mean_over_ranks, place_over_ranks, sum_over_ranks
from hybrid_rlhf.core.errors import CRITIC_CURE, NotFinite, present
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import SequenceBatch, masked_mean
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.rewards.mixture import Scale
from hybrid_rlhf.roles import AuxiliaryLoss, Roles, TokenScores
from hybrid_rlhf.roles.role_state import scale_schedule, schedule_at
from hybrid_rlhf.rollout import Prompts, Rollout, Totals
from hybrid_rlhf.rollout.collect import collect, collect_held_out, measure_values, samples_of
from hybrid_rlhf.rollout.dynamic_sampling import resample_groups
from hybrid_rlhf.rollout.old_logprobs import OldLogprobs
from hybrid_rlhf.trainers.ppo_config import DistillTerm, PPOConfig

_UPDATED = ("grad_norm", "learning_rate", "micro_batch_tokens", "train/skipped_updates", "train/loss_scale")  # of each


class PPOTrainer:
    """One step: sample, estimate advantages once, update actor and critic for some epochs.

    scale: normalises the scores before they become rewards (None: as they are). extra_prompts: returns further prompts,
    for config.max_refills. ptx: the texts of config.ptx_coef. distill: the weight of the teacher's divergence.
    """

    progress_keys = ("reward", "kl", "completions/mean_length", "entropy", "policy/clip_fraction")

    def __init__(self, roles: Roles, source: RewardSource, config: PPOConfig, *, seed: int,
                 scale: Scale | None = None, extra_prompts: Callable[[], Prompts] | None = None,
                 ptx: Loader[SequenceBatch] | None = None, distill: DistillTerm | None = None) -> None:
        if bool(config.ptx_coef) != (ptx is not None):
            raise ValueError(f"ptx_coef is {config.ptx_coef} with{'' if ptx else 'out'} a pretraining stream")
        if config.kl_coef and roles.ref is None:
            raise ValueError(f"kl_coef is {config.kl_coef}, and there is no reference to measure the KL against")
        if config.max_refills and extra_prompts is None:
            raise ValueError(f"max_refills is {config.max_refills}, and there is nowhere to take more prompts from")
        self.distill = distill or DistillTerm()
        if self.distill.coef:
            present(roles.teacher, "the teacher of distill.coef").check(self.distill.top_k)
        self.scale, self.extra_prompts, self.ptx = scale, extra_prompts, ptx
        self.roles, self.source, self.config, self.seed = roles, source, config, seed
        self.estimator = ESTIMATORS[config.estimator]
        kl_coef = present(config.kl_coef, "ppo.kl_coef")
        self.kl_coef = FixedKL(kl_coef) if config.kl_target is None else AdaptiveKL(
            kl_coef, config.kl_target, config.kl_horizon)
        self.rate = UpdateRate(config.update_kl)
        if config.update_kl:
            scale_schedule(roles.actor, lambda: self.rate.value)
        self.rng = torch.Generator().manual_seed(seed)
        self.average = roles.actor.average(config.ema_decay) if config.ema else None
        self.old_logprobs = OldLogprobs(config.old_logprobs_from, config.max_logprob_drift)
        self.num_steps = 0
        self.last_rollout: Rollout | None = None

    def step(self, prompts: Prompts) -> Metrics:
        metrics = Metrics()
        self._set_schedules(prompts)
        rollout = self._sample(prompts, metrics)
        if self.roles.critic:
            self.roles.critic.begin(rollout.shaped_scores, rollout)
            measure_values(rollout, self.roles, metrics)
        self.last_rollout = rollout
        self.estimate(rollout, metrics)
        trained = rollout.without_truncated() if self.config.mask_truncated else rollout
        if self.distill.coef and not self.is_warming_up:
            self._ask_teacher(trained, metrics)
        with metrics.timer("train"):
            updated = self.update(trained.scored())
        trained.teacher = None  # last_rollout is kept for its samples, and this is gigabytes
        metrics.add("kl_coef", self.kl_coef.value)
        if self.roles.ref and not self.is_warming_up:  # in warm-up the KL is 0 and must not change kl_coef
            self.kl_coef.update(*mean_over_ranks(rollout.mean_kl(), len(rollout)))
        self.num_steps += 1
        return metrics + updated + rollout.metrics()

    def _ask_teacher(self, rollout: Rollout, metrics: Metrics) -> None:
        with metrics.timer("teacher"):
            teacher = present(self.roles.teacher, "the teacher")
            batch = teacher.reads(rollout).sequences(self.roles.actor.engine.pad_id)
            rollout.teacher = teacher.targets(batch, self.distill.kind, self.distill.top_k)

    @property
    def warmup_steps(self) -> int:
        return self.config.critic_warmup_steps or 0

    @property
    def is_warming_up(self) -> bool:
        """Whether this step trains the critic alone."""
        return self.num_steps < self.warmup_steps

    def _set_schedules(self, prompts: Prompts) -> None:
        """Set the learning rates by the step's place in the run: updates that earlier steps skipped, by stopping early
        or for lack of responses, do not delay the end of the decay."""
        total = place_over_ranks(len(prompts) * self.config.sampling.num_samples)[1]
        num_updates = self._num_epochs * -(-total // self._minibatch_size(total))  # of one step
        num_trained = max(0, self.num_steps - self.warmup_steps)  # steps of the actor
        schedule_at(self.roles.actor, num_trained * num_updates)
        if self.roles.critic:
            schedule_at(self.roles.critic, self.num_steps * num_updates)

    def _sample(self, prompts: Prompts, metrics: Metrics) -> Rollout:
        """Responses to these prompts and, with max_refills, to further ones in place of zero-variance groups."""
        config, size = self.config, self.config.sampling.num_samples

        def sample(batch: Prompts, number: int) -> Rollout:
            rollout = collect(batch, self.roles, self.source, config.sampling, self._sampling_seed() + number * 500_009,
                              metrics, self.old_logprobs, with_values=False, keep_candidates=config.replay_truncation)
            self.shape(rollout)
            if size > 1:
                has_none = ~rollout.has_reward_variance(size)
                metrics.add("frac_reward_zero_std", has_none.float().mean(), len(has_none))
            return rollout

        first = sample(prompts, 0)
        if not config.max_refills:
            return first
        extra_prompts = present(self.extra_prompts, "extra_prompts")
        return resample_groups(first, size, config.max_refills, lambda number: sample(extra_prompts(), number), metrics)

    @torch.no_grad()
    def estimate(self, rollout: Rollout, metrics: Metrics) -> None:
        """Fill in rewards, advantages and returns, once per rollout; they are 0 where a response has no score."""
        config, mask = self.config, rollout.action_mask & ~rollout.shaped_scores.isnan()[:, None]
        if rollout.values is not None and not torch.isfinite(rollout.values[mask]).all():  # no update possible
            raise NotFinite(f"the critic's values are not finite; {CRITIC_CURE}")
        reference = present(rollout.ref_logprobs, "ref_logprobs") if self.roles.ref else rollout.logprobs
        kl = kl_estimate(rollout.logprobs, reference, config.kl_kind)
        kl_coef = self.kl_coef.value if config.kl_in_reward else 0.0
        rollout.rewards = shape_rewards(rollout.shaped_scores, kl, kl_coef, mask, rollout.token_scores)
        rollout.advantages, rollout.returns = self.estimator.fn(
            rollout.rewards, mask, values=rollout.values, group_size=config.sampling.num_samples,
            gamma=config.gamma, lam=config.lam, reduce=sum_over_ranks, step_ends=rollout.step_ends)
        if config.whitens:
            whitened = whiten_responses if self.estimator.sums else whiten
            rollout.advantages = whitened(rollout.advantages, mask, reduce=sum_over_ranks)
        if rollout.values is not None:
            metrics.add("value/explained_variance", explained_variance(rollout.values, rollout.returns, mask,
                                                                          reduce=sum_over_ranks))
            metrics.add("value/mean", masked_mean(rollout.values, mask), mask.sum())
        penalty = -kl_coef * kl.masked_fill(~mask, 0).sum(1)
        metrics.add("objective/non_score_reward", penalty.mean(), len(rollout))

    def shape(self, rollout: Rollout) -> None:
        """Fill in the shaped scores: each response's score on `scale`, less penalties for length and for not ending. An
        estimator that normalises each source takes the penalties as one more, of weight 1."""
        config, scores = self.config, rollout.scores
        if self.scale is not None:
            scores, rollout.is_clipped = self.scale(scores)
        if self.estimator.by_source:
            sources = rollout.objectives() or [(scores, 1.0)]
            penalties = self._penalised(torch.zeros_like(scores), rollout)
            shaped = decoupled([*sources, (penalties, 1.0)], config.sampling.num_samples)
            rollout.shaped_scores = shaped.masked_fill(scores.isnan(), math.nan)
            return
        if config.min_score is not None or config.max_score is not None:
            scores = scores.clamp(config.min_score, config.max_score)
        rollout.shaped_scores = self._penalised(scores, rollout)

    def _penalised(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """Scores (B,) less the penalties for length and for not ending."""
        config = self.config
        if config.overlong_penalty:
            scores = scores + config.overlong_penalty * overlong(
                rollout.response_mask.sum(1), config.sampling.max_new_tokens, config.overlong_buffer)
        penalty = present(config.missing_eos_penalty, "ppo.missing_eos_penalty")
        return missing_eos(scores, rollout.has_eos, penalty)

    def update(self, rollout: Rollout) -> Metrics:
        """num_ppo_epochs passes over the rollout in shuffled minibatches: the actor's step, then the critic's.

        The order is one over all processes' sequences, so that their number does not change the gradient. With
        early_stop_kl the passes end after a minibatch whose KL to the sampling policy is too large.
        """
        metrics, config, (first, total) = Metrics(), self.config, place_over_ranks(len(rollout))
        if not total:  # no response has a score
            return metrics
        limit, is_stopped, kl = config.early_stop_kl or None, False, 0.0
        minibatches = (m for _ in range(self._num_epochs)
                       for m in rollout.shuffled(self._minibatch_size(total), self.rng, first, total))
        count = self._num_epochs * -(-total // self._minibatch_size(total))
        for minibatch in activity.parts("training, minibatch", minibatches, count):
            observed = self._update_on(minibatch)
            metrics += observed
            if limit is not None or config.update_kl:
                kl = observed.over_ranks().compute().get("policy/approx_kl", 0.0)
            is_stopped = limit is not None and kl > limit
            if is_stopped:
                break
        if config.update_kl and not self.is_warming_up:
            metrics.add("policy/rate_factor", self.rate.value)
            self.rate.update(kl)
        return metrics if limit is None else metrics.add("policy/early_stop", float(is_stopped))

    def _update_on(self, minibatch: Rollout) -> Metrics:
        """The optimizer steps of one minibatch: the actor's, unless the critic warms up, and the critic's."""
        metrics = Metrics()
        if not self.is_warming_up:
            with self.roles.actor.resident():
                auxiliary, loss = self._pretraining(minibatch), self.actor_loss
                if self.config.top_entropy_quantile < 1:
                    loss = partial(loss, entropy_floor=self._entropy_floor(minibatch))
                metrics += self.roles.actor.update(minibatch, loss, auxiliary, teacher=minibatch.teacher)
                if self.average is not None:
                    self.average.update()
            if auxiliary is not None:
                metrics.add("ptx/coef", auxiliary.weight)
        if self.roles.critic:
            critic_metrics = self.roles.critic.update(minibatch, self.critic_loss)
            metrics += critic_metrics.renamed({n: f"value/{n.removeprefix('train/')}" for n in _UPDATED})
        return metrics

    def _entropy_floor(self, minibatch: Rollout) -> float:
        """An entropy, in nats, below those of the tokens that top_entropy_quantile keeps, and above the others': a
        quantile of the minibatch's tokens of all processes, so that its split into micro-batches does not matter.
        Halfway between two tokens, as another forward rounds otherwise."""
        scores = self.roles.actor.score_tokens(minibatch.sequences(self.roles.actor.engine.pad_id), with_entropy=True,
                                               temperature=minibatch.temperature)
        local = [value for part in scores for value in present(part.entropy, "the entropy").tolist()]
        ordered = torch.tensor([value for part in gather_over_ranks(local) for value in part]).sort().values
        place = math.ceil(round((len(ordered) - 1) * (1 - self.config.top_entropy_quantile), 6))
        return float(ordered[place - 1 : place + 1].mean()) if place > 0 else -math.inf

    def _pretraining(self, minibatch: Rollout) -> AuxiliaryLoss | None:
        """The next rows of the pretraining stream, and the factor of their loss in the actor's step."""
        if self.ptx is None:
            return None
        batch = self.ptx.next()
        scale = 1.0 if self.config.ptx_scale == "fixed" else self._relative(minibatch, batch)
        return AuxiliaryLoss(batch, _ptx_loss, self.config.ptx_coef * scale)

    def _relative(self, minibatch: Rollout, batch: SequenceBatch) -> float:
        """The size of the policy loss over the pretraining loss, both of this optimizer step, over all processes.

        The size is the policy loss with |advantage| as every action's loss, as at ratio 1; the loss itself is about 0
        there, because its terms cancel.
        """
        denominator = self._denominator(minibatch, minibatch.totals())
        scores = self.roles.actor.score_tokens(batch)
        advantages = minibatch.of_actions(minibatch.advantages)
        local = [(advantages.abs() / denominator).sum(), -sum(s.logprobs.double().sum() for s in scores),
                 sum(s.logprobs.numel() for s in scores)]
        size, loss, count = sum_over_ranks(torch.tensor([float(x) for x in local], dtype=torch.float64)).tolist()
        return size / max(loss / max(count, 1), 1e-8)

    def _denominator(self, rows: Rollout, totals: Totals) -> Tensor | float:
        """The divisor of each action's loss; the totals are those of the whole minibatch."""
        return denominators(self.config.averaging, rows.owners(), num_actions=totals.num_actions, num_rows=len(rows),
                            num_sequences=totals.num_sequences, length=self.config.sampling.max_new_tokens)

    def _minibatch_size(self, num_sequences: int) -> int:
        if self.config.minibatch_size:
            return self.config.minibatch_size
        return -(-num_sequences // present(self.config.num_minibatches, "ppo.num_minibatches"))

    @property
    def _num_epochs(self) -> int:
        return present(self.config.num_ppo_epochs, "ppo.num_ppo_epochs")

    def actor_loss(self, tokens: TokenScores, rows: Rollout, totals: Totals,
                   entropy_floor: float | None = None) -> tuple[Tensor, dict]:
        """The loss of these rows as a share of the minibatch's, and its metrics. entropy_floor: the least entropy, in
        nats, of a token that stays in the policy loss."""
        config, owner, old = self.config, rows.owners(), rows.of_actions(rows.logprobs)
        denominator, advantages = self._denominator(rows, totals), rows.of_actions(rows.advantages)
        weights, weighed = self._importance(rows, owner, old)
        for is_kept, name in self._selected(tokens, rows, owner, advantages, entropy_floor):
            weights = is_kept.float() if weights is None else weights * is_kept
            weighed[name] = ((~is_kept).sum() / max(len(owner), 1), len(owner))
        loss, observed = policy_loss(tokens.logprobs, old, advantages, owner=owner,
                                     kind=config.policy_loss, cliprange=config.clipranges, dual_clip=config.dual_clip,
                                     denominator=denominator, weights=weights, num_rows=len(rows),
                                     **config.loss_options)
        size, observed = len(owner), observed | weighed
        if not config.kl_in_reward and self.roles.ref:
            reference = rows.of_actions(present(rows.ref_logprobs, "ref_logprobs"))
            ratio = (kl_ratio(tokens.logprobs, old, config.policy_loss, owner, len(rows))
                     if config.kl_bias_correction else None)
            term = kl_loss(tokens.logprobs, reference, config.kl_kind, denominator, ratio)
            loss = loss + self.kl_coef.value * term
        if tokens.divergence is not None:
            loss = loss + self.distill.coef * tokens.divergence.sum() / totals.num_actions
            observed["distill/divergence"] = (tokens.divergence.detach().mean(), size)
        if tokens.entropy is not None:
            observed["entropy"] = (tokens.entropy.detach().mean(), size)
            if config.entropy_coef:
                loss = loss + config.entropy_coef * entropy_loss(tokens.entropy, denominator=totals.num_actions)
        # their mean by rows is then the mean of the minibatches' losses
        observed["loss"] = (loss.detach() * totals.num_sequences / max(len(rows), 1), len(rows))
        return loss, observed

    def _selected(self, tokens: TokenScores, rows: Rollout, owner: Tensor, advantages: Tensor,
                  entropy_floor: float | None) -> Iterator[tuple[Tensor, str]]:
        """(N,) bool, the actions that stay in the policy loss, and the metric that counts the others; for each rule."""
        if self.config.max_off_policy_kl is not None:
            yield near_sampler(tokens.logprobs, rows.of_actions(rows.sampled_logprobs), advantages, owner,
                               max_kl=self.config.max_off_policy_kl, num_rows=len(rows)), "policy/off_policy_masked"
        if entropy_floor is not None:
            yield present(tokens.entropy, "the entropy") >= entropy_floor, "policy/low_entropy_masked"

    def _importance(self, rows: Rollout, owner: Tensor, old: Tensor) -> tuple[Tensor | None, dict]:
        """Importance weights (N,) for the sampler-trainer mismatch, or None, and their metrics."""
        config = self.config
        if config.importance == "none":
            return None, {}
        sampled = rows.of_actions(rows.sampled_logprobs)
        if config.importance != "masked":
            weights = importance_weights(old, sampled, owner, level=config.importance, cap=config.importance_cap,
                                         num_rows=len(rows))
            return weights, {"policy/importance": (weights.mean(), len(owner))}
        low, high = config.importance_band
        is_within = sequences_within(old, sampled, owner, low=low, high=high, num_rows=len(rows))
        share = (~is_within).sum() / max(len(rows), 1)
        return is_within[owner].float(), {"policy/masked_sequences": (share, len(rows))}

    def critic_loss(self, new_values: Tensor, rows: Rollout, totals: Totals) -> tuple[Tensor, dict]:
        """Clipped value loss of these rows as a share of the minibatch's, and its metrics."""
        limit = self.config.cliprange_value
        if limit is not None:
            limit = limit * present(self.roles.critic, "the critic").std
        old, returns = (rows.of_actions(x) for x in (present(rows.values, "values"), rows.returns))
        loss, observed = value_loss(new_values, old, returns, cliprange_value=limit, denominator=totals.num_actions)
        return self.config.vf_coef * loss, observed

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Scores, KL and lengths of fresh responses to held-out prompts (always the same draw)."""
        return collect_held_out(batches, self.roles, self.source, self.config.sampling, self.seed,
                                keep_candidates=self.config.replay_truncation)

    def _sampling_seed(self) -> int:
        """Another seed at every step, so that a resumed run samples what the original would have sampled."""
        return self.seed * 1_000_003 + self.num_steps

    def samples(self, count: int = 4) -> list[dict]:
        """The first responses of the last rollout, for people."""
        return samples_of(self.last_rollout, count)

    def _parts(self) -> dict[str, Any]:
        """The parts with a state of their own beside the roles, by name. Each has state() and load_state()."""
        parts = {"kl_coef": self.kl_coef, "gate": self.old_logprobs, "source": self.source, "ptx": self.ptx,
                 "average": self.average, "rate": self.rate}
        return {name: part for name, part in parts.items() if hasattr(part, "state")}  # source: a user's may have one

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        progress = {"num_steps": self.num_steps, "rng": self.rng.get_state()}
        return self.roles.state() | progress | {name: part.state() for name, part in self._parts().items()}

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        self.roles.load_state(state)
        self.num_steps = int(state["num_steps"])
        self.rng.set_state(state["rng"])
        for name, part in self._parts().items():
            part.load_state(state[name])


def _ptx_loss(tokens: TokenScores, count: Tensor) -> tuple[Tensor, dict]:
    loss, observed = imitation_loss(tokens.logprobs, tokens.correct, denominator=count)
    return loss, {f"ptx/{name}": value for name, value in observed.items()}
