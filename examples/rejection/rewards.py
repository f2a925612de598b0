"""What chooses among the responses of the rejection example."""

from __future__ import annotations


def says_why(completions: list, **columns: list) -> list[float]:
    """1 for an answer with more than its number, else 0."""
    return [float(len(c[-1]["content"].split()) >= 4) for c in completions]
