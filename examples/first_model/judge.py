"""What a good answer is here: the right capital, the wish, one short sentence. `good` is a reward function."""

from __future__ import annotations

WISH, MAX_WORDS = "have a good trip!", 16


def marks(answer: str, capital: str) -> dict[str, bool]:
    """Each thing that is asked of an answer, and whether it is there."""
    return {"fact": capital.lower() in answer.lower(), "wish": answer.strip().endswith(WISH),
            "short": 0 < len(answer.split()) <= MAX_WORDS and answer.count(WISH) <= 1}


def good(completions: list, capital: list[str], **columns: list) -> list[float]:
    """The share of the marks that each answer has."""
    said = (c if isinstance(c, str) else c[-1]["content"] for c in completions)
    return [sum(marks(a, c).values()) / 3 for a, c in zip(said, capital, strict=True)]
