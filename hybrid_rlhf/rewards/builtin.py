"""Builtin reward functions: `builtin:NAME` in reward.functions, their fields in reward.options.NAME."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from typing import Any

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.data.demo import is_correct
from hybrid_rlhf.rewards import text_of
from hybrid_rlhf.rewards.reasoning_task import ReasoningTask
from hybrid_rlhf.rewards.user_code import Overdue, within

_log = logging.getLogger(__name__)

# A sign counts unless a word, number or bracket ends before it: "10-5" ends in 5. Thousands need groups of three.
_NUMBER = re.compile(r"(?P<sign>(?<![\w)\].])[-\u2212+])?(?:[$\u20ac\u00a3\u00a5](?P<inner>[-\u2212])?\s?)?"
                     r"(?P<whole>(?<![0-9])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
                     r"(?P<rest>(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)")


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, or None: "so $1,234.50." is 1234.50, "-$5" and "$-5" are -5, "10-5" is 5."""
    match = None
    for match in _NUMBER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if match is None:
        return None
    is_negative = "-" in (sign := (match["sign"] or "") + (match["inner"] or "")) or "\u2212" in sign
    value = Decimal(match["whole"].replace(",", "") + match["rest"])
    return value.copy_negate() if is_negative else value


def after_marker(text: str, marker: str | None) -> str:
    """The text behind the last `marker`, empty where it is missing; all of the text if marker is None."""
    return text if marker is None else text.rpartition(marker)[2] if marker in text else ""


@dataclass(frozen=True)
class ExactMatch:
    """`correct` where the stripped completion equals the column's text, else `wrong`; None without a reference.

    marker: only the text behind its last occurrence counts, in the completion and, if it is there, in the reference.
    """

    column: str = "answer"
    marker: str | None = None
    ignore_case: bool = False
    correct: float = 1.0
    wrong: float = 0.0

    def __call__(self, completions: list, **columns: list) -> list[float | None]:
        return _judged(self, completions, columns, self._is_right)

    def _is_right(self, answer: str, reference: object) -> bool:
        wanted = str(reference)
        wanted = after_marker(wanted, self.marker) or wanted
        pair = after_marker(answer, self.marker).strip(), wanted.strip()
        return pair[0].casefold() == pair[1].casefold() if self.ignore_case else pair[0] == pair[1]


@dataclass(frozen=True)
class NumericMatch:
    """`correct` where the completion's last number is that of the column (GSM8K's "... #### 72" too), else `wrong`.

    None without a reference. marker: only the text behind its last occurrence in the completion counts. tolerance: the
    largest difference that is still correct, relative to the reference.
    """

    column: str = "answer"
    marker: str | None = None
    tolerance: float = 0.0
    correct: float = 1.0
    wrong: float = 0.0

    def __post_init__(self) -> None:
        check(self.tolerance >= 0,
              f"reward.options.numeric_match: tolerance is {self.tolerance}; it must not be negative")

    def __call__(self, completions: list, **columns: list) -> list[float | None]:
        return _judged(self, completions, columns, self._is_right)

    def _is_right(self, answer: str, reference: object) -> bool:
        wanted, number = last_number(str(reference)), last_number(after_marker(answer, self.marker))
        if wanted is None:
            raise ValueError(f"no number in column {self.column}: {reference!r:.60}")
        if number is None or number == wanted:
            return number is not None
        return self.tolerance > 0 and abs(float(number) - float(wanted)) <= self.tolerance * abs(float(wanted))


@dataclass
class MathMatch:
    """`correct` where math-verify finds the completion's LaTeX answer, the boxed one first, equal to the column's, else
    `wrong`, as TRL's accuracy_reward. None without a reference, and with one that math-verify cannot read.

    marker: only the text behind its last occurrence in the completion counts (</think>, say, as in TRL's
    reasoning_accuracy_reward). seconds: an answer that takes longer to compare is wrong; the first one is logged.
    Raises UserError without the package math-verify.
    """

    column: str = "answer"
    marker: str | None = None
    seconds: float = 5.0
    correct: float = 1.0
    wrong: float = 0.0

    def __post_init__(self) -> None:
        self._was_late = False
        try:
            self._parser: Any = import_module("math_verify.parser")
            self._grader: Any = import_module("math_verify")
        except ImportError as error:
            raise UserError(f"math_match: the package math-verify cannot be imported ({error}); pip install "
                            "'hybrid-rlhf[math]'") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit: `within` is one

    def __call__(self, completions: list, **columns: list) -> list[float | None]:
        return _judged(self, completions, columns, self._is_right)

    def _is_right(self, answer: str, reference: object) -> bool | None:
        parser = self._parser
        gold = parser.parse(str(reference), parsing_timeout=None)
        # TRL's settings: an answer must be LaTeX, without malformed operators. math-verify runs nothing of a text: what
        # it hands to sympy's parser, which evaluates, is digits and operators.
        latex = parser.LatexExtractionConfig(
            normalization_config=parser.NormalizationConfig(units=True), boxed_match_priority=0,
            try_extract_without_anchor=False)

        def is_equal() -> bool:
            parsed = parser.parse(after_marker(answer, self.marker), extraction_config=[latex],
                                  extraction_mode="first_match", parsing_timeout=None)
            return self._grader.verify(gold, parsed, timeout_seconds=None)

        try:
            return within(self.seconds, is_equal) if gold else None
        except Overdue:
            if not self._was_late:
                _log.warning("warning: math_match takes more than %g s for an answer; such answers count as wrong",
                             self.seconds)
            self._was_late = True
            return False


def _judged(source: ExactMatch | NumericMatch | MathMatch, completions: list, columns: dict[str, list],
            is_right: Callable[[str, object], bool | None]) -> list[float | None]:
    """The source's `correct` or `wrong`; None without a reference, and where is_right cannot say."""
    if source.column not in columns:
        raise ValueError(f"no column {source.column}; there are {', '.join(columns)}")
    pairs = zip(map(text_of, completions), columns[source.column], strict=True)
    verdicts = [None if r is None else is_right(c, r) for c, r in pairs]
    return [None if v is None else source.correct if v else source.wrong for v in verdicts]


@dataclass(frozen=True)
class LengthPenalty:
    """0 up to max_tokens - buffer, then linearly down to -penalty at max_tokens and beyond (DAPO's soft overlong
    punishment, arXiv 2503.14476, equation 13). Tokens count as sampled, with the end marker."""

    max_tokens: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        check(0 < self.buffer <= self.max_tokens,
              f"reward.options.length_penalty: buffer is {self.buffer}; it must lie between 1 and max_tokens "
              f"({self.max_tokens})")

    def __call__(self, completion_ids: list[list[int]], **_: list) -> list[float]:
        over = (len(ids) - (self.max_tokens - self.buffer) for ids in completion_ids)
        return [-self.penalty * min(max(n / self.buffer, 0.0), 1.0) for n in over]


@dataclass(frozen=True)
class RepetitionPenalty:
    """-penalty times the share of repeated n-grams of words (lower case): 1 - distinct / all, as in
    arXiv 2502.03373. 0 for a completion of fewer than n words."""

    n: int = 3
    penalty: float = 1.0

    def __post_init__(self) -> None:
        check(self.n >= 1, f"reward.options.repetition_penalty: n is {self.n}; it must be at least 1")

    def __call__(self, completions: list, **_: list) -> list[float]:
        return [-self.penalty * self._share(text_of(c).lower().split()) for c in completions]

    def _share(self, words: list[str]) -> float:
        grams = [tuple(words[i : i + self.n]) for i in range(len(words) - self.n + 1)]
        return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True)
class Format:
    """`correct` where the whole completion matches the regular expression (. matches line ends too), else `wrong`.

    pattern: by default that of TRL's think_format_reward, <think> ... </think> and an answer. is_whole: false searches
    for it anywhere in the completion.
    """

    pattern: str = r"<think>(?!.*<think>).*?</think>.*"
    is_whole: bool = True
    correct: float = 1.0
    wrong: float = 0.0

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error

    def __call__(self, completions: list, **_: list) -> list[float]:
        pattern = re.compile(self.pattern, re.DOTALL)
        find = pattern.fullmatch if self.is_whole else pattern.search
        return [self.correct if find(text_of(c)) else self.wrong for c in completions]


@dataclass(frozen=True)
class DemoCorrect:
    """1 where the demo task's checker finds the answer right, else 0. With weight 0 it leaves the reward as it is and
    shows whether the policy exploits the reward model."""

    def __call__(self, prompts: list, completions: list, **_: list) -> list[float]:
        return [float(is_correct(p, text_of(c))) for p, c in zip(prompts, completions, strict=True)]


def accuracy_reward(completions: list, solution: list, **_: object) -> list[float | None]:
    """TRL's function of this name: MathMatch on the column `solution`."""
    return MathMatch("solution")(completions, solution=solution)


def think_format_reward(completions: list, **_: object) -> list[float]:
    """TRL's function of this name: Format without options."""
    return Format()(completions)


BUILTINS: dict[str, type[Any]] = {
    "exact_match": ExactMatch, "numeric_match": NumericMatch, "math_match": MathMatch, "length_penalty": LengthPenalty,
    "repetition_penalty": RepetitionPenalty, "format": Format, "demo_correct": DemoCorrect,
    "reasoning_gym": ReasoningTask}
