"""Sample, score and measure one policy's answers to a list of prompts, for comparing models."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from hybrid_rlhf.core.config import check
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.examples import with_score
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.report.compare import Answered
from hybrid_rlhf.rewards import Reporting, RewardSource, part_scores
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.training import builders

# name -> module:function(prompt messages or text, completion) -> bool, an independent check of correctness
CHECKERS = {"demo": "hybrid_rlhf.data.demo:is_correct"}

NO_VERDICT, UNSCORED = "answers_without_a_verdict_of_the_judge", "answers_without_a_score"  # facts of evaluate.json


def open_actor(model: ModelConfig, tokenizer) -> Actor:  # noqa: ANN001
    """A policy without an optimizer, to sample from and to score with."""
    causal = builders.open_policy(model, tokenizer, 0, dropout=False)
    return Actor(builders.policy_engine(causal, tokenizer), tokenizer)


@torch.no_grad()
def respond(actor: Actor, prompts: Prompts, sampling: SamplingConfig, seed: int,
            asked: Prompts | None = None) -> Rollout:
    """sampling.num_samples responses to each prompt, with the actor's log-probabilities of them.

    asked: the same prompts in the form that the actor reads, if another (`in_words`); the rollout has `prompts`.
    """
    repeated = prompts.repeat(sampling.num_samples)
    with actor.inference():
        rollout = actor.generate((asked or prompts).repeat(sampling.num_samples), sampling, seed)
    rollout.logprobs = actor.logprobs(rollout)  # (B, R)
    if actor.episodes is None:  # otherwise the environments wrote the prompts
        rollout.prompts = repeated
    return rollout


@torch.no_grad()
def judge(rollout: Rollout, source: RewardSource, reference: Reference | None) -> None:
    """Fill in scores, the parts of them, and the reference's log-probabilities (None: it cannot read these tokens)."""
    if reference is not None:
        rollout.ref_logprobs = reference.logprobs(rollout)  # (B, R)
    rollout.scores = part_scores(source, rollout)  # (B,), NaN where every source skipped
    rollout.source_scores = rollout.source_scores or {source.name: rollout.scores}


def unjudged(source: RewardSource) -> float:
    """The share of answers since the last call without a verdict of the judge; 0 without a judge."""
    metrics = Metrics()
    if isinstance(source, Reporting):
        source.report(metrics)
    return metrics.compute().get("judge/failed", 0.0)


def print_unjudged(shares: dict[str, float], fate: str) -> dict[str, str]:
    """Print a line where the judge has no verdict on some answers, which a model's mean score hides; returns it as a
    fact for evaluate.json. fate: reward.judge.on_failure."""
    if not any(shares.values()):
        return {}
    what = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    what += f" (their score: {'that of others' if fate == 'mean' else 'none'})"
    print(f"evaluate: answers without a verdict of the judge: {what}", file=sys.stderr)
    return {NO_VERDICT: what}


def print_unscored(answered: Sequence[Answered]) -> dict[str, str]:
    """Print a line where every source skipped some answers, which scores and wins leave out; returns it as a fact for
    evaluate.json. UserError where a model has no score that can be compared."""
    counts = {model.name: int(np.isnan(model.scores).sum()) for model in answered}
    for model in answered:
        names = " or ".join(dict.fromkeys((answered[0].name, model.name)))
        check(not np.isnan(model.scores + answered[0].scores).all(),
              f"every reward source skipped all answers of {names} to the same prompts; give one that scores them")
    if not any(counts.values()):
        return {}
    what = ", ".join(f"{name} {count}" for name, count in counts.items())
    print(f"evaluate: answers that every reward source skipped, left out of scores and wins: {what}", file=sys.stderr)
    return {UNSCORED: what}


def in_words(prompts: Prompts, template: str, tokenizer, raw: bool = False) -> Prompts:  # noqa: ANN001
    """The prompts with `template` around the last user turn ({prompt} stands for it), tokenized anew. raw: data.raw."""
    asked = [chat.as_turn(tokenizer, with_score(p, 0.0, template), raw) for p in prompts.columns["prompt"]]
    return replace(prompts, ids=[chat.encode_prompt(tokenizer, p) for p in asked],
                   texts=[chat.compose_prompt(tokenizer, p).shown for p in asked])


def is_right(checker: str, rollout: Rollout) -> list[bool]:
    """Whether the checker finds each completion right."""
    module, function = CHECKERS[checker].split(":")
    check_answer: Callable = getattr(importlib.import_module(module), function)
    return [check_answer(p, c) for p, c in zip(rollout.prompts.columns["prompt"], rollout.completions, strict=True)]


def share(values: Iterable[bool]) -> float:
    items = list(values)
    return sum(items) / len(items)


def nats_from(rollout: Rollout) -> list[float]:
    """sum_t (logprobs - ref_logprobs) of each of the B responses: its estimate of KL(actor || reference)."""
    return (rollout.logprobs - rollout.ref_logprobs).masked_fill(~rollout.action_mask, 0).sum(1).tolist()
