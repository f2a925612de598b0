"""Reward functions for sums whose answer is known: called with lists, as TRL calls them."""

from __future__ import annotations


def text_of(completion: str | list[dict]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def is_short(completions: list, max_words: int = 60, **columns: list) -> list[float]:
    """1 for an answer of at most `max_words` words, else 0. `columns` holds the dataset's other columns."""
    return [float(len(text_of(c).split()) <= max_words) for c in completions]


async def shows_its_work(completions: list, level: list, **columns: list) -> list[float | None]:
    """1 where an equals sign stands before the answer; None, no opinion, for the easy rows. May be async."""
    return [None if hard < 2 else float("=" in text_of(c)) for c, hard in zip(completions, level, strict=True)]
