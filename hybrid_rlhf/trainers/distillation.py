"""On-policy distillation: the student is trained towards a teacher on the student's own samples.

Generalised knowledge distillation (2306.13649): a divergence of the two distributions at every token, on the student's
own samples, on demonstrations, or on both. policy_gradient: the same reverse KL from the sampled tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import floor

import torch
from torch import Tensor

from hybrid_rlhf.algorithms.divergence import KINDS, Divergence
from hybrid_rlhf.algorithms.policy import policy_loss
from hybrid_rlhf.core import activity
from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.distributed import place_over_ranks
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.options import check_values, one_of, within
from hybrid_rlhf.core.tensors import SequenceBatch, masked_mean, scatter
from hybrid_rlhf.data.loader import Loader
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.roles import Roles, Teacher, TokenScores
from hybrid_rlhf.roles.role_state import schedule_at
from hybrid_rlhf.rollout import Prompts, Rollout, Totals
from hybrid_rlhf.rollout.best_of_n import BestOfNSampler
from hybrid_rlhf.rollout.collect import collect

POLICY_GRADIENT = "policy_gradient"
CLIPRANGE = (0.2, 0.2)  # of the ratio in policy_gradient, for several updates on a rollout: PPO's


@dataclass(frozen=True)
class DistillConfig:
    """How the student learns from its teacher, and on which texts.

    Attributes:
        sampling: How the student's responses are drawn.
        lmbda: Share of the steps that are made on the student's own samples (TRL's GKDTrainer calls it so); the others
            are made on demonstrations. They are spread evenly: at 0.5 every second step.
        divergence: reverse_kl (mode-seeking: the student's text is to be likely under the teacher), forward_kl
            (mode-covering: the teacher's text is to be likely under the student), jsd (between them, see beta), each
            over the whole vocabulary; or policy_gradient (reverse_kl from the sampled tokens alone: the teacher only
            scores them).
        beta: Of jsd, between 0 (as forward_kl) and 1 (as reverse_kl).
        temperature: Divides the logits of both before they are compared.
        top_k: The divergence over the teacher's k likeliest tokens and all others as one: a lower bound, for a teacher
            whose weights are sharded; 0 takes the whole vocabulary.
        teacher_prompt: Jinja template of what the teacher reads in the place of the last user message, over the row's
            columns and prompt, response, score, feedback (a judge's remark), best and best_score (the best other
            response to the prompt): "{{ prompt }} The answer is {{ answer }}."; null: what the student reads.
        teacher_ema: With roles.teacher.model_name_or_path self and LoRA, the teacher is the moving average of the
            student's own adapter with this decay, such as 0.95, in place of the start; null: the start.
        num_epochs: Passes over the samples (or demonstrations) of a step.
        num_minibatches: Optimizer steps per pass.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    lmbda: float = within(1.0, "[0, 1]")
    divergence: str = one_of("reverse_kl", (*KINDS, POLICY_GRADIENT))
    beta: float = within(0.5, "(0, 1)")
    temperature: float = within(1.0, "(0,")
    top_k: int = within(0, "[0,")
    teacher_prompt: str | None = None
    teacher_ema: float | None = within(None, "[0, 1)")
    num_epochs: int = within(1, "[1,")
    num_minibatches: int = within(1, "[1,")

    def __post_init__(self) -> None:
        check_values(self, "distill.")
        check(self.divergence != POLICY_GRADIENT or self.lmbda == 1,
              f"distill.divergence policy_gradient learns from the student's own samples alone, and distill.lmbda is "
              f"{self.lmbda}; leave it out, or choose reverse_kl")
        check(self.sampling.temperature > 0 or self.divergence != POLICY_GRADIENT,
              "distill.sampling.temperature is 0: a policy gradient needs samples; take 1")
        check(self.teacher_prompt is None or self.lmbda == 1,
              f"distill.teacher_prompt is given, and distill.lmbda is {self.lmbda}: the teacher reads demonstrations "
              "as they are; leave one of them out")

    @property
    def kind(self) -> Divergence | None:
        """The divergence over the vocabulary, or None for policy_gradient."""
        if self.divergence == POLICY_GRADIENT:
            return None
        return Divergence(self.divergence, beta=self.beta, temperature=self.temperature)


class DistillTrainer:
    """One step: sample, run the teacher, and update towards it; or the same on demonstrations, of which
    `demonstrations` yields minibatches (needed where lmbda is below 1). source: scores the samples for the report.
    averaged: with teacher_ema, a teacher over the actor's engine, which reads under the average of its weights."""

    progress_keys = ("distill/divergence", "distill/data_divergence", "distill/teacher_kl", "entropy",
                     "completions/mean_length", "reward")

    def __init__(self, roles: Roles, source: RewardSource, config: DistillConfig, *, seed: int,
                 demonstrations: Loader[SequenceBatch] | None = None, averaged: Teacher | None = None) -> None:
        teacher = averaged or roles.teacher
        if teacher is None or (averaged is None) != (config.teacher_ema is None):
            raise ValueError("distillation without a teacher, or with two")
        if (config.lmbda < 1) != (demonstrations is not None):
            raise ValueError(f"lmbda is {config.lmbda} with{'' if demonstrations else 'out'} demonstrations")
        if config.kind is not None:
            teacher.check(config.top_k)
        self.roles, self.source, self.config, self.seed = roles, source, config, seed
        self.teacher, self.kind, self.demonstrations = teacher, config.kind, demonstrations
        self.teacher_average = None if config.teacher_ema is None else roles.actor.average(config.teacher_ema)
        self.sampler = BestOfNSampler(roles, source, config.sampling, seed,
                                      keep_candidates=config.kind is None)  # for its ratio
        self.rng = torch.Generator().manual_seed(seed)
        self.num_steps = 0

    def step(self, prompts: Prompts) -> Metrics:
        config, number = self.config, self.num_steps
        schedule_at(self.roles.actor, number * config.num_epochs * config.num_minibatches)
        self.num_steps += 1
        # the number of steps on samples, without this one and with it
        if floor((number + 1) * config.lmbda + 1e-9) > floor(number * config.lmbda + 1e-9):
            return self._step_on_samples(prompts)
        return self._step_on_demonstrations()

    def _step_on_samples(self, prompts: Prompts) -> Metrics:
        metrics = Metrics()
        rollout, _ = self.sampler.sample(prompts, metrics)
        rollout.source_weights = {}  # no score is trained on
        with metrics.timer("teacher"), self._as_teacher():
            self._ask(rollout, metrics)
        with metrics.timer("train"):
            learned = self._learn(rollout)
        rollout.teacher = None  # last_rollout is kept for its samples, and this is gigabytes
        return metrics + learned + rollout.metrics()

    def _learn(self, rollout: Rollout) -> Metrics:
        """num_epochs passes over the samples of all processes, in shuffled minibatches."""
        metrics, (first, total) = Metrics(), place_over_ranks(len(rollout))
        for _ in activity.epochs(self.config.num_epochs if total else 0):
            for minibatch in rollout.shuffled(-(-total // self.config.num_minibatches), self.rng, first, total):
                metrics += self.roles.actor.update(minibatch, self.loss, teacher=minibatch.teacher)
                if self.teacher_average is not None:
                    self.teacher_average.update()
        return metrics

    def _step_on_demonstrations(self) -> Metrics:
        metrics, learned, demonstrations = Metrics(), Metrics(), present(self.demonstrations, "demonstrations")
        self.sampler.last_rollout = None  # that of an earlier step is not this one's: of its tokens, its samples
        batches = [demonstrations.next() for _ in range(self.config.num_minibatches)]
        activity.doing("asking the teacher")
        with metrics.timer("teacher"):
            asked = [self.teacher.targets(batch, present(self.kind, "kind"), self.config.top_k) for batch in batches]
        with metrics.timer("train"):
            for _ in activity.epochs(self.config.num_epochs):
                for batch, targets in zip(batches, asked, strict=True):
                    learned += self.roles.actor.fit_tokens(batch, _data_loss, teacher=targets)
        return metrics + learned

    def _as_teacher(self) -> AbstractContextManager:
        """The block in which the teacher is asked: the actor's weights are their average, where that is the teacher."""
        return self.teacher_average.in_model() if self.teacher_average is not None else nullcontext()

    @torch.no_grad()
    def _ask(self, rollout: Rollout, metrics: Metrics) -> None:
        """Set the teacher's targets for the samples or, for policy_gradient, the advantages; and measure the student's
        KL to it."""
        activity.doing("asking the teacher")
        pad_id, mask = self.roles.actor.engine.pad_id, rollout.action_mask
        num_compared = count = int(mask.sum())
        if self.kind is None:
            rollout.advantages, ratios, num_outside = self.teacher.log_ratios(rollout)  # (B, R)
            num_compared -= num_outside
            distance = -ratios.sum() / max(1, num_compared)
            metrics.add("distill/divergence", distance, num_compared)
            if self.teacher.own_tokens is not None:
                metrics.add("distill/uncompared", num_outside / max(1, count), count)
        else:
            rollout.teacher, rows = self.teacher.read(self.teacher.reads(rollout).sequences(pad_id), self.kind,
                                                      self.config.top_k, rollout.temperature)
            distance = masked_mean(rollout.logprobs - scatter(_joined(rows), mask), mask)
            if rollout.teacher.ids is not None:
                outside = _joined([1 - row.exp().sum(-1) for row in rollout.teacher.rows]).clamp(min=0)
                metrics.add("distill/teacher_mass_outside", outside.mean(), len(outside))
        metrics.add("distill/teacher_kl", distance, num_compared)

    def loss(self, tokens: TokenScores, rows: Rollout, totals: Totals) -> tuple[Tensor, dict]:
        """The loss of these rows as a share of the minibatch's, and its metrics."""
        size = tokens.logprobs.numel()
        if self.kind is None:
            loss, observed = policy_loss(
                tokens.logprobs, rows.of_actions(rows.logprobs), rows.of_actions(rows.advantages), owner=rows.owners(),
                kind="ppo", cliprange=CLIPRANGE, dual_clip=None, denominator=totals.num_actions, weights=None,
                num_rows=len(rows))
        else:
            divergence = present(tokens.divergence, "the divergence")
            loss = divergence.sum() / totals.num_actions
            observed = {"distill/divergence": (divergence.detach().mean(), size)}
        return loss, observed | {"entropy": (present(tokens.entropy, "entropy").detach().mean(), size)}

    def evaluate(self, batches: Iterable[Prompts]) -> Metrics:
        """Divergence, scores and lengths of fresh responses to held-out prompts (always the same draw)."""
        metrics = Metrics()
        for i, prompts in enumerate(batches):
            rollout = collect(prompts, self.roles, self.source, self.config.sampling, self.seed + i, Metrics(),
                              keep_candidates=self.kind is None)
            rollout.source_weights = {}
            with self._as_teacher():
                self._ask(rollout, metrics)
            if self.kind is not None:
                batch = rollout.sequences(self.roles.actor.engine.pad_id)
                for tokens in self.roles.actor.score_tokens(batch, teacher=rollout.teacher):
                    divergence = present(tokens.divergence, "the divergence")
                    metrics.add("distill/divergence", divergence.mean(), divergence.numel())
            metrics += rollout.metrics()
        return metrics.over_ranks()

    def samples(self) -> list[dict]:
        return self.sampler.samples()

    def state(self) -> dict:
        """Everything that the next step depends on; the tensors are not copied."""
        progress = {"num_trainer_steps": self.num_steps, "rng": self.rng.get_state()}
        average = {"teacher_average": self.teacher_average.state()} if self.teacher_average is not None else {}
        return self.sampler.state() | progress | average | (
            {"demonstrations": self.demonstrations.state()} if self.demonstrations else {})

    def load_state(self, state: Mapping) -> None:
        """Restore `state`."""
        self.sampler.load_state(state)
        self.num_steps = int(state["num_trainer_steps"])
        self.rng.set_state(state["rng"])
        if self.teacher_average is not None:
            self.teacher_average.load_state(state["teacher_average"])
        if self.demonstrations:
            self.demonstrations.load_state(state["demonstrations"])


def _joined(rows: list[Tensor]) -> Tensor:
    """Concatenate the rows (n,); a process may have none in an evaluation."""
    return torch.cat([*rows, torch.zeros(0)])


def _data_loss(tokens: TokenScores, count: Tensor) -> tuple[Tensor, dict]:
    divergence = present(tokens.divergence, "the divergence")
    return divergence.sum() / count, {"distill/data_divergence": (divergence.detach().mean(), divergence.numel())}
