"""Reward sources: anything with a name and `score(rollout)`, a number for each response."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.rollout import Rollout


def __getattr__(name: str) -> object:
    """TRL's reward functions where its scripts import them from, on first use: their module imports this one."""
    if name in ("accuracy_reward", "think_format_reward"):
        return getattr(importlib.import_module(f"{__name__}.builtin"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class RewardSource(Protocol):
    """A source of scores for an on-policy method. `name` stands in its metrics, rewards/{name}/mean and /std."""

    name: str

    def score(self, rollout: Rollout) -> Tensor | list:
        """Scores of whole responses, higher is better: a tensor (B,) from a model, or a list from a user's code, where
        None skips a response."""
        ...


@runtime_checkable
class Reporting(Protocol):
    """A source with metrics of its own, such as the cost of a judge."""

    def report(self, metrics: Metrics) -> None:
        """Add the metrics of the scores since the last report."""
        ...


class BadScore(RuntimeError):
    """A source returned scores that must not be trained on."""


class BadAnswer(BadScore, UserError):
    """A user's source (a function, a service) failed, or returned scores that must not be trained on."""


def checked_scores(source: RewardSource, rollout: Rollout) -> Tensor:
    """The source's scores, (B,) fp32 and finite. Raises BadScore naming the source and the first bad response."""
    scores = part_scores(source, rollout)
    skipped = torch.isnan(scores).nonzero()
    if len(skipped):
        first = int(skipped[0])
        raise BadAnswer(f"reward source {source.name}: response {first} was skipped by every source and has no score: "
                        f"{shown(rollout, first)}; one source must have a number for it")
    return scores


def part_scores(source: RewardSource, rollout: Rollout) -> Tensor:
    """(B,) fp32 scores of one of several sources, NaN where it skipped a response (None) and nowhere else.

    Raises BadScore for a wrong number of scores, and for a score that is not finite; BadAnswer, a UserError, where a
    user's code returned it.
    """
    answers = source.score(rollout)
    if isinstance(answers, Tensor):
        return _checked(source.name, answers.detach().float().cpu(), rollout)
    if isinstance(answers, (str, Mapping)) or not hasattr(answers, "__len__") or not hasattr(answers, "__getitem__"):
        raise BadAnswer(f"reward source {source.name}: answered {answers!r:.60} ({type(answers).__name__}) for "
                        f"responses 0 to {len(rollout) - 1}; a list of numbers or None is needed, one for each")
    if len(answers) != len(rollout):
        raise BadAnswer(f"reward source {source.name}: {len(answers)} scores for {len(rollout)} responses "
                        f"(response {min(len(answers), len(rollout))} is the first without its match); give "
                        "one for each")
    return torch.tensor([_number(source.name, answers[i], i, rollout) for i in range(len(rollout))])


def _number(name: str, answer: object, i: int, rollout: Rollout) -> float:
    """One answer as a float, NaN for None."""
    if answer is None:
        return math.nan
    value: Any = answer.item() if isinstance(answer, Tensor) and answer.numel() == 1 else answer
    is_number = isinstance(value, Real)
    if not is_number or not abs(value) <= torch.finfo(torch.float32).max:
        raise BadAnswer(f"reward source {name}: score {value!r:.60} for response {i}, where a finite number or None is "
                        f"needed: {shown(rollout, i)}")
    return float(value)


def _checked(name: str, scores: Tensor, rollout: Rollout) -> Tensor:
    if scores.shape != (len(rollout),):
        raise BadScore(f"reward source {name}: {len(rollout)} responses, scores of shape {tuple(scores.shape)}, where "
                       "one for each is needed")
    if not torch.isfinite(scores).all():
        first = int((~torch.isfinite(scores)).nonzero()[0])
        raise BadScore(f"reward source {name}: score {float(scores[first])} for response {first}, where a finite "
                       f"number is needed: {shown(rollout, first)}")
    return scores


def shown(rollout: Rollout, i: int) -> str:
    """The beginning of a response, on one line, for a message."""
    text = rollout.completions[i] if rollout.completions else ""
    return repr(text if len(text) <= 80 else text[:80] + "...")


def text_of(completion: str | list[dict]) -> str:
    """The completion itself if it is text, or the content of its last assistant message."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m["role"] == "assistant"), "")
