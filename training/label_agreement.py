"""Measure how far each reward source agrees with labelled data, such as a judge before it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from hybrid_rlhf.core import config
from hybrid_rlhf.data import labels
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.data.labels import LabelledAnswer, LabelledPair, Labels
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.report.agreement import Agreement, of_answers, of_pairs
from hybrid_rlhf.report.compare import Method
from hybrid_rlhf.report.terminal import ProgressLine
from hybrid_rlhf.rewards import RewardSource
from hybrid_rlhf.rewards.judge import JudgeSource
from hybrid_rlhf.training.scored_answers import check_sources, scores_of

T = TypeVar("T")
HALF = 0.5  # threshold on a judge's scale from 0 to 1: from it on an answer counts as good
OPTION = "evaluate.labels"


def read(path: str, limit: int | None, seed: int, held_out: float | None = None, why: str = "") -> Labels:
    """Read the labels at `path`, at most `limit` rows (or held-out ones alone, see `read_labels`), and print their
    number and why others were left out."""
    labelled = labels.read_labels(Source(path), limit, seed, held_out)
    what = f"{len(labelled.pairs)} pairs" if labelled.pairs else f"{len(labelled.answers)} answers"
    lost = "".join(f"; {count} left out: {reason}" for reason, count in labelled.lost.items())
    print(f"evaluate: {what} with labels, of {labelled.read} rows of {path}"
          f"{f' ({why})' if why else ''}{lost}", file=sys.stderr)
    return labelled


def check(labelled: Labels, sources: Sequence[RewardSource], tokenizer) -> None:  # noqa: ANN001
    """UserError for a source that cannot score these rows, before anything is asked."""
    for source in sources:
        config.check(bool(labelled.pairs) or not is_comparing(source),
                     f"{OPTION}: these answers are labelled one by one, and {source.name} compares; give pairs, or "
                     "reward.judge.mode absolute")
    check_sources(sources, [row.columns for row in (labelled.pairs or labelled.answers)], tokenizer, OPTION)


def measure(labelled: Labels, sources: Sequence[RewardSource], method: Method, tokenizer=None,  # noqa: ANN001
            batch_size: int = 256) -> list[Agreement]:
    """The agreement of each source with the labels. tokenizer: for functions that read tokens."""
    agreement = _of_pairs if labelled.pairs else _of_answers
    for source in sources:
        if hasattr(source, "open"):  # it loads a model
            source.open()
    return [agreement(labelled.pairs or labelled.answers, source, method, tokenizer, batch_size) for source in sources]


def check_verdicts(agreements: Sequence[Agreement], sources: Sequence[RewardSource]) -> None:
    """UserError for a source without a score or verdict on any label: it was not measured."""
    for row, source in zip(agreements, sources, strict=True):
        is_judge = isinstance(source, JudgeSource)
        last, cure = (f" (the last: {source.last_failure})", "take a judge or a rubric that it answers") if is_judge \
            else ("", "give a source that scores such rows")
        config.check(row.failures < row.items, f"{OPTION}: {row.source} has no {'verdict' if is_judge else 'score'} on "
                                               f"any of the {row.items} {row.kind}{last}; {cure}")


def _of_pairs(pairs: Sequence[LabelledPair], source: Any, method: Method, tokenizer, size: int  # noqa: ANN001
              ) -> Agreement:
    numbers = [pair.prompt_number for pair in pairs]
    if is_comparing(source):
        comparisons = [each for part in _parts(pairs, size, source, "pairs")
                       for each in source.compare(*map(list, zip(*((p.prompt, p.better, p.worse) for p in part),
                                                                 strict=True)))]
        return of_pairs(source.name, [None if p.winner is None else {"first": 1, "tie": 0, "second": -1}[p.winner]
                                      for p in comparisons], numbers, [p.is_consistent for p in comparisons], method)
    prompts, columns = [p.prompt for p in pairs for _ in range(2)], [p.columns for p in pairs for _ in range(2)]
    scores = scores_by(source, prompts, [text for p in pairs for text in (p.better, p.worse)], columns, tokenizer, size)
    verdicts = [None if a is None or b is None else (a > b) - (a < b)
                for a, b in zip(scores[::2], scores[1::2], strict=True)]
    return of_pairs(source.name, verdicts, numbers, [], method)


def _of_answers(answers: Sequence[LabelledAnswer], source: Any, method: Method, tokenizer, size: int  # noqa: ANN001
                ) -> Agreement:
    scores = scores_by(source, [a.prompt for a in answers], [a.answer for a in answers], [a.columns for a in answers],
                       tokenizer, size)
    return of_answers(source.name, scores, [a.label for a in answers], [a.prompt_number for a in answers], method,
                      HALF if hasattr(source, "grade") else None)


def is_comparing(source: Any) -> bool:
    """Whether a source is a judge that compares two answers, rather than grading each by itself."""
    return hasattr(source, "compare") and source.config.mode != "absolute"


def scores_by(source: Any, prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict], tokenizer,  # noqa: ANN001
              size: int) -> list[float | None]:
    """A score for each answer, None without one. A judge is asked for grades, as its `score` replaces failures by
    another value."""
    rows, scores = list(zip(prompts, answers, columns, strict=True)), []
    for part in _parts(rows, size, source, "answers"):
        asked, texts, more = map(list, zip(*part, strict=True))
        if hasattr(source, "grade"):
            scores += [None if grade is None else grade.score for grade in source.grade(asked, texts)]
        else:
            scores += scores_of(source, asked, texts, more, tokenizer, size)
    return scores


def _parts(rows: Sequence[T], size: int, source: Any, what: str) -> Iterator[Sequence[T]]:
    """`size` rows at a time, with a line of progress now and then."""
    progress = ProgressLine("evaluate")
    for first in range(0, len(rows), size):
        yield rows[first : first + size]
        progress.update(f"{source.name} has read {min(first + size, len(rows))} of {len(rows)} {what} with labels")
