"""Rows with answers: those that somebody has labelled, to measure judges by, in the formats that training reads."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from hybrid_rlhf.core.config import check
from hybrid_rlhf.data import sources
from hybrid_rlhf.data.blend import is_held_out, split_key
from hybrid_rlhf.data.chat import SkipRow, Text
from hybrid_rlhf.data.schema import KINDS, Example, Format, format_of, read_row
from hybrid_rlhf.data.source import Source

NO_PROMPT, TURNS = "no prompt", "an answer of several turns"
EMPTY, ONE, SAME = "an empty answer", "one answer alone, beside pairs", "no two answers of different score"


class LabelledPair(NamedTuple):
    """Two answers as texts, of which a label prefers the first. prompt_number: the same for pairs of one prompt.
    columns: the row's other columns, for reward functions."""

    prompt: Text
    better: str
    worse: str
    columns: dict
    prompt_number: int


class LabelledAnswer(NamedTuple):
    """An answer with its own label, higher being better."""

    prompt: Text
    answer: str
    label: float
    columns: dict
    prompt_number: int


@dataclass
class Labels:
    """Pairs, or, where no row has two answers to compare, answers. lost: why rows or answers were left out -> how
    often; read: rows of the file; is_held_out: whether only those that training holds out were taken."""

    read: int
    pairs: list[LabelledPair] = field(default_factory=list)
    answers: list[LabelledAnswer] = field(default_factory=list)
    lost: Counter = field(default_factory=Counter)
    is_held_out: bool = False


def read_labels(source: Source, limit: int | None, seed: int, held_out: float | None = None) -> Labels:
    """The labels of a file or folder, of at most `limit` rows, which `seed` draws. held_out: only of the rows that a
    stage with this data.eval_fraction does not train on.

    Raises UserError for what holds no labels (formats of kind preference or unpaired do), or none that can be used.
    """
    rows = sources.read(source)
    form = format_of(rows, source.path)
    check("graded answer" in KINDS[form.kind],
          f"{source.path} is {form.name} data ({', '.join(form.required)}), which holds no labels; give "
          "prompt+chosen+rejected, prompt+completions+scores or prompt+completion+label")
    found = Labels(len(rows), is_held_out=held_out is not None)
    read = list(_examples(rows, form, source.path, found.lost))
    if held_out is not None:
        read = [example for example in read if is_held_out(split_key(example), held_out)]
        check(bool(read), f"{source.path}: none of its rows is held out (data.eval_fraction {held_out:g}); raise it, "
                          "or read all of them by --evaluate.rows all")
    if limit is not None and limit < len(read):
        read = [read[i] for i in sorted(random.Random(seed).sample(range(len(read)), limit))]
    numbers: dict[str, int] = {}
    for example in read:
        number = numbers.setdefault(prompt_key(example.prompt), len(numbers))
        found.pairs += _pairs(example, number, found.lost)
    alone = [example for example in read if len(example.answers) == 1]
    if found.pairs:
        found.lost += Counter({ONE: len(alone)} if alone else {})
    else:
        found.answers = [one for e in alone for one in _answers(e, numbers[prompt_key(e.prompt)])]
        check(not found.answers or len({one.label for one in found.answers}) > 1,
              f"{source.path}: every answer has the same label; give good and bad ones")
    check(bool(found.pairs or found.answers), f"{source.path}: no label can be used: "
          + ", ".join(f"{n} x {reason}" for reason, n in found.lost.items()) + "; give other data")
    return found


def _examples(rows: Iterable[dict], form: Format, where: str, lost: Counter) -> Iterator[Example]:
    """The canonical rows that have a prompt."""
    for number, row in enumerate(rows, 1):
        try:
            example = read_row(row, form, f"{where} row {number}")
        except SkipRow as reason:
            lost[str(reason)] += 1
            continue
        if example.prompt and not example.is_text_pair:
            yield example
        else:
            lost[NO_PROMPT] += 1


def _pairs(example: Example, number: int, lost: Counter) -> Iterator[LabelledPair]:
    """Every two answers of different score."""
    ranked = sorted(_usable(example, lost), key=lambda a: -a[1])
    found = [(a, b) for (a, high), (b, low) in combinations(ranked, 2) if high > low and a != b]
    if len(ranked) > 1 and not found:
        lost[SAME] += 1
    for better, worse in found:
        yield LabelledPair(example.prompt or "", better, worse, example.columns, number)


def _answers(example: Example, number: int) -> Iterator[LabelledAnswer]:
    for answer, label in _usable(example, Counter()):  # counted before
        yield LabelledAnswer(example.prompt or "", answer, label, example.columns, number)


def _usable(example: Example, lost: Counter) -> list[tuple[str, float]]:
    """The answers as texts, without those that a reader of text cannot be shown."""
    out = []
    for answer, score in example.answers:
        text = spoken(answer)
        if text is None or not text.strip():
            lost[TURNS if text is None else EMPTY] += 1
        else:
            out.append((text, score))
    return out


def spoken(answer: Text) -> str | None:
    """An answer's text: a string, or what one assistant message says; None where it has other turns or calls tools."""
    if isinstance(answer, str):
        return answer
    is_one = len(answer) == 1 and answer[0]["role"] == "assistant" and not answer[0].get("tool_calls")
    return answer[0]["content"] if is_one else None


def prompt_key(prompt: Text | None) -> str:
    """The same for the same prompt, whatever the order of a message's keys."""
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)
