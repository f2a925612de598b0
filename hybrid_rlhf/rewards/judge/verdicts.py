"""Parses a judge's reply strictly: one JSON object at its end, with the keys that were asked for and no others."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_rlhf.models.thoughts import MARKERS
from hybrid_rlhf.rewards.judge.judge_prompts import YES_NO, Rubric

_WORDS = {"yes": 1.0, "no": 0.0}
_BETTER = {"A": 1.0, "B": 0.0, "tie": 0.5}


class Unreadable(Exception):  # noqa: N818 - its message is sent to the judge
    """A reply without a valid verdict; the message says why, and is sent to the judge."""


@dataclass(frozen=True)
class Grade:
    """One response on its own. score: the weighted mean of items, name -> value, all in [0, 1]. reason: in the judge's
    words, empty where there are none. mass: with `score: probability`, the total probability of the candidate words,
    the least over the items (1: the judge would write nothing else)."""

    score: float
    items: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    mass: float = 1.0


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt. orders: how much better the first is, 1 (better), 0.5 (a tie), 0 (worse) or between
    them for a probability: the verdict where it is shown first, and where it is shown second; None where the judge's
    reply could not be read. reasons: of both verdicts. failure: why, where one is None."""

    orders: tuple[float | None, float | None]
    reasons: tuple[str, str] = ("", "")
    failure: str | None = None

    @property
    def share(self) -> float | None:
        """How much of this comparison the first response wins, in [0, 1]; None where one order is missing."""
        first, second = self.orders
        return None if first is None or second is None else (first + second) / 2

    @property
    def winner(self) -> str | None:
        """first, second or tie, by both orders together; None where one is missing."""
        return None if self.share is None else _side(self.share)

    @property
    def is_consistent(self) -> bool | None:
        """Whether both orders name the same one (or both a tie); None where one is missing."""
        first, second = self.orders
        return None if first is None or second is None else _side(first) == _side(second)


def _side(share: float) -> str:
    return "first" if share > 0.5 else "second" if share < 0.5 else "tie"


def read_grade(reply: str, rubric: Rubric) -> Grade:
    """The reply to an absolute question: a value for each item. Raises Unreadable."""
    verdict, reason = _object(reply)
    _check_keys(verdict, [item.name for item in rubric.items])
    values = {}
    for item in rubric.items:
        value = verdict[item.name]
        values[item.name] = _yes_no(value, item.name) if item.kind == YES_NO else _number(value, item.name, 10) / 10
    return Grade(rubric.score(values), values, reason)


def read_better(reply: str) -> tuple[float, str]:
    """The reply to a comparison: how much better A is (1, 0.5, 0), and why. Raises Unreadable."""
    verdict, reason = _object(reply)
    _check_keys(verdict, ["better"])
    better = verdict["better"]
    if not isinstance(better, str) or better not in _BETTER:
        raise Unreadable(f'"better" is {_shown(better)}; it must be "A", "B" or "tie"')
    return _BETTER[better], reason


def read_ranking(reply: str, letters: Sequence[str]) -> tuple[list[float], str]:
    """The reply to a group: the score of each letter's response in [0, 1], in order, and why. Raises Unreadable."""
    verdict, reason = _object(reply)
    _check_keys(verdict, letters)
    return [_number(verdict[letter], letter, 1) for letter in letters], reason


def without_thoughts(reply: str) -> str:
    """The reply without the thoughts at its beginning; empty if it ends inside them. A chat template may have opened
    the thought already, so that the reply has only its closing marker."""
    openings, closings = ([marker.strip() for marker in side] for side in zip(*MARKERS, strict=True))
    end = max(reply.rfind(mark) + len(mark) if mark in reply else 0 for mark in closings)
    if not end and reply.lstrip().startswith(tuple(openings)):
        return ""
    return reply[end:].lstrip() if end else reply


def _object(reply: str) -> tuple[dict[str, Any], str]:
    """The JSON object that ends a reply, and the text before it joined with its "reason"."""
    answer = without_thoughts(reply)
    if reply.strip() and not answer.strip():
        raise Unreadable("it ends in its thoughts, before a verdict")
    text = re.sub(r"```(?:json)?\s*$", "", answer.rstrip()).rstrip()
    decoder = json.JSONDecoder(object_pairs_hook=_without_repeats)
    verdict, start, end, place = None, 0, 0, text.find("{")
    while place >= 0:
        try:
            value, after = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):  # a judge that repeats itself
            place = text.find("{", place + 1)
            continue
        verdict, start, end = value, place, after
        place = text.find("{", after)
    if not isinstance(verdict, dict):
        raise Unreadable("there is no JSON object at its end (it may have been cut off before)")
    if text[end:].strip():
        raise Unreadable("there are words behind the JSON object")
    before = re.sub(r"```(?:json)?\s*$", "", text[:start].rstrip()).strip()
    reason = verdict.pop("reason", "")
    if not isinstance(reason, str):
        raise Unreadable(f'"reason" is {_shown(reason)}; it must be text')
    return verdict, " ".join(part for part in (before, reason.strip()) if part)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")
    return values


def _check_keys(verdict: Mapping[str, Any], wanted: Sequence[str]) -> None:
    missing = [key for key in wanted if key not in verdict]
    more = [key for key in verdict if key not in wanted]
    if missing:
        raise Unreadable(f"the JSON object has no {', '.join(missing)}")
    if more:
        raise Unreadable(f"the JSON object has {', '.join(map(_shown, more[:5]))}, which was not asked for")


def _yes_no(value: object, name: str) -> float:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, str) or value.strip().lower() not in _WORDS:
        raise Unreadable(f'"{name}" is {_shown(value)}; it must be "yes" or "no"')
    return _WORDS[value.strip().lower()]


def _number(value: object, name: str, most: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most or math.isnan(value):
        raise Unreadable(f'"{name}" is {_shown(value)}; it must be a number from 0 to {most}')
    return float(value)


def _shown(value: object) -> str:
    return json.dumps(value)[:60]
