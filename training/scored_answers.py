"""Score answers: those that a policy samples, to compare models, and those that a file has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.data.examples import with_score
from hybrid_rlhf.engine.decode.sampling import SamplingConfig
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.report.compare import Answered
from hybrid_rlhf.rewards import BadAnswer, Reporting, RewardSource, part_scores
from hybrid_rlhf.rewards.functions import FunctionSource, parameters
from hybrid_rlhf.rewards.judge import JudgeSource
from hybrid_rlhf.roles import Actor, Reference
from hybrid_rlhf.rollout import Prompts, Rollout
from hybrid_rlhf.training import builders

# name -> module:function(prompt messages or text, completion) -> bool, an independent check of correctness
CHECKERS = {"demo": "hybrid_rlhf.data.demo:is_correct"}

_OURS = ("prompt", "prompts", "completions", "completion_ids")  # columns of a rollout itself
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


def nats_from(rollout: Rollout) -> list[float]:
    """sum_t (logprobs - ref_logprobs) of each of the B responses: its estimate of KL(actor || reference)."""
    return (rollout.logprobs - rollout.ref_logprobs).masked_fill(~rollout.action_mask, 0).sum(1).tolist()


# -- answers from a file -----------------------------------------------------------------------------------------------


def scores_of(source: RewardSource, prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict],
              tokenizer=None, batch_size: int = 256, owners: Sequence[int] | None = None  # noqa: ANN001
              ) -> list[float | None]:
    """A source's score of each answer, None where it skipped one. columns: the other columns of each row; tokenizer:
    for functions that read completion_ids; owners: one number for the answers to one prompt that are scored relative to
    each other, which must be adjacent and in one batch (None: each by itself)."""
    owners = range(len(answers)) if owners is None else owners
    if hasattr(source, "policy_tokenizer"):  # a process reward model, which may have another policy's from before
        source.policy_tokenizer = tokenizer
    scores: list[float | None] = []
    for first in range(0, len(answers), batch_size):
        part = slice(first, first + batch_size)
        scores += _batch(source, prompts[part], answers[part], columns[part], owners[part], tokenizer)
    return scores


def _batch(source: RewardSource, prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict],
           owners: Sequence[int], tokenizer) -> list[float | None]:  # noqa: ANN001
    """The scores of a few answers. An answer that a model cannot read (too many tokens, perhaps) has none: one line."""
    try:
        scores = part_scores(source, rollout_of(prompts, answers, columns, owners, tokenizer)).tolist()
    except UserError as error:
        if isinstance(error, BadAnswer) or isinstance(source, JudgeSource):
            raise
        if len(answers) == 1:
            print(f"no score for an answer: {error}", file=sys.stderr)
            return [None]
        return [score for i in range(len(answers)) for score in _batch(
            source, prompts[i : i + 1], answers[i : i + 1], columns[i : i + 1], owners[i : i + 1], tokenizer)]
    return [None if score != score else score for score in scores]


def rollout_of(prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict], owners: Sequence[int],
               tokenizer=None) -> Rollout:  # noqa: ANN001
    """The answers as responses that ended; those of one owner are samples of one prompt, as judges see it. Without a
    tokenizer the token ids are placeholders, and only sources that read text may score the rollout
    (`check_sources`)."""
    names = dict.fromkeys(name for row in columns for name in row if name not in _OURS)
    extra = {name: [row.get(name) for row in columns] for name in names} | {"prompt": list(prompts)}
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] if tokenizer else [] for answer in answers]
    texts = [prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt) for prompt in prompts]
    shared: dict[int, list[int]] = {}
    asked = Prompts([shared.setdefault(owner, [0]) for owner in owners], texts, extra)
    return Rollout.from_responses(asked, [row or [0] for row in ids], [True] * len(answers), 0, list(answers))


def check_sources(sources: Sequence[RewardSource], columns: Sequence[dict], tokenizer, option: str  # noqa: ANN001
                  ) -> None:
    """UserError for a function that needs a column which the rows do not have, or tokens where there is no tokenizer.
    option: where the rows come from."""
    names = [name for name in dict.fromkeys(n for row in columns for n in row) if name not in _OURS]
    for source in sources:
        if isinstance(source, FunctionSource):
            source.check_columns(names)
            check(tokenizer is not None or "completion_ids" not in parameters(source.function)[0],
                  f"{option}: {source.name} reads completion_ids, and there is no tokenizer to make them; name a "
                  "model, or let the function read completions")
