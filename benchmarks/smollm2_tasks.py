"""The tasks of smollm2.py: questions with one number for an answer, in a folder as train.jsonl and test.jsonl."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ASKED = ("What is {a} + {b}? Answer with a number.", "What is {a} plus {b}? Answer with a number.")
NUM_TOKENS = {"sums": 12, "gcd": 24, "chain_sum": 24}  # of an answer: "13 + 14 = 27" and its end are 11
GYM = {"gcd": {"min_numbers": 2, "max_numbers": 2, "max_value": 20},
       "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def sums(folder: Path) -> Path:
    """All ordered pairs of 1 to 20 in `folder`: test.jsonl, and train.jsonl with no pair of test in any order.

    Of train's questions also pairs.jsonl, a right answer and one that is off by 1 to 9, and talks.jsonl, the right one.
    """
    draw = random.Random(7)
    pairs = [(a, b) for a in range(1, 21) for b in range(a, 21)]
    draw.shuffle(pairs)
    half = len(pairs) // 2 + 1
    test, train = (sorted({pair for a, b in part for pair in ((a, b), (b, a))})
                   for part in (pairs[:half], pairs[half:]))
    draw.shuffle(test)
    draw.shuffle(train)
    asked = [(a, b, words) for a, b in train for words in ASKED]
    rows = {"test": [_row(a, b, ASKED[i % 2]) for i, (a, b) in enumerate(test)],
            "train": [_row(*each) for each in asked],
            "pairs": [_pair(*each, off=draw.choice([-1, 1]) * draw.randint(1, 9)) for each in asked],
            "talks": [{"messages": [*_row(a, b, words)["prompt"], *_said(a, b, a + b)]} for a, b, words in asked]}
    return _written(folder, rows)


def gym(name: str, folder: Path) -> Path:
    """A task of reasoning-gym (`pip install reasoning-gym==0.1.25`, which nothing else needs), all questions that 2,000
    draws give: half of them to train on, the other half with no pair of numbers of the first, in any order."""
    if (folder / "test.jsonl").exists():
        return folder
    import reasoning_gym

    made = sorted({(row["question"], str(row["answer"]))
                   for row in reasoning_gym.create_dataset(name, size=2000, seed=1, **GYM[name])})
    numbers = sorted({_numbers(question) for question, _ in made})
    random.Random(7).shuffle(numbers)
    tests = set(numbers[: len(numbers) // 2 + 1])
    rows = {part: [{"prompt": [{"role": "user", "content": question}], "answer": answer} for question, answer in made
                   if (_numbers(question) in tests) == (part == "test")] for part in ("train", "test")}
    return _written(folder, rows)


def _numbers(question: str) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"\d+", question)))


def _written(folder: Path, rows: dict[str, Iterable[dict]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return folder


def _row(a: int, b: int, words: str) -> dict:
    return {"prompt": [{"role": "user", "content": words.format(a=a, b=b)}], "answer": str(a + b)}


def _pair(a: int, b: int, words: str, off: int) -> dict:
    return {"prompt": _row(a, b, words)["prompt"], "chosen": _said(a, b, a + b), "rejected": _said(a, b, a + b + off)}


def _said(a: int, b: int, total: int) -> list[dict]:
    return [{"role": "assistant", "content": f"{a} + {b} = {total}"}]


TASKS: dict[str, Callable[[Path], Path]] = {"sums": sums} | {name: partial(gym, name) for name in GYM}
