"""A task of reasoning-gym: its questions by number, and the scores of answers; a builtin reward function."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.function_worker import one_line
from hybrid_rlhf.rewards import text_of

_log = logging.getLogger(__name__)

# Tasks of reasoning-gym 0.1.25 whose scoring passes the answer to eval, Python's or sympy's: the model's text would run
# as code in this process.
EVALUATES = frozenset({
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion"})
INSTRUCTION = "Give your final answer between <answer> and </answer>."


@dataclass
class ReasoningTask:
    """Entries of `task` made with `settings` (its own options, seed among them), and their scores: as a reward function
    those of completions as answers to the entries that `column` numbers, None without a number.

    Rows are made by `task_rows`, with the same settings. tag: the answer is the text in the last <tag>...</tag>; None:
    all of the text, stripped. allow_eval: whether one of EVALUATES may be used. Raises UserError without reasoning-gym
    and for bad settings.
    """

    task: str
    settings: dict = field(default_factory=dict)
    tag: str | None = "answer"
    column: str = "index"
    allow_eval: bool = False

    def __post_init__(self) -> None:
        self._has_failed = False
        check(self.allow_eval or self.task not in EVALUATES,
              f"reasoning_gym: {self.task} scores an answer by running it as Python code, in this process; choose "
              "another task, or set allow_eval true if nothing here must be safe from what the model writes")
        try:
            factory = import_module("reasoning_gym.factory")
        except ImportError as error:
            raise UserError(f"reasoning_gym: the package cannot be imported ({error}); pip install reasoning-gym, or "
                            "hybrid-rlhf[gym]") from error
        check(self.task in factory.DATASETS, f"reasoning_gym: there is no task {self.task!r}"
                                             f"{nearest(str(self.task), factory.DATASETS)}; its page lists them")
        try:
            self._dataset: Any = factory.create_dataset(self.task, **{"seed": 0, **self.settings})
        except Exception as error:  # each task has checks of its own, assertions mostly
            what = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"reasoning_gym: {self.task} with {self.settings} cannot be made ({what:.200}); fix its "
                            "settings") from error

    def __call__(self, completions: list, **columns: list) -> list[float | None]:
        references = columns.get("answer") or [None] * len(completions)
        return [None if index is None else self.score(text_of(completion), self.entry(index, reference))
                for completion, index, reference in zip(completions, columns[self.column], references, strict=True)]

    def entry(self, index: object, reference: object = None) -> dict:
        """Question, answer and metadata of entry `index`. UserError if that is not a number, or if `reference`, the
        answer in the data, differs."""
        check(isinstance(index, int) and index >= 0,
              f"reasoning_gym: a row's index is {index!r:.40}; it must be the number of an entry, from 0 on")
        entry = self._dataset[index]
        check(reference is None or str(reference) == str(entry["answer"]),
              f"reasoning_gym: the answer to entry {index} of {self.task} is {entry['answer']!r:.60}, and the data has "
              f"{reference!r:.60}; give the settings (and the release of reasoning-gym) that it was made with")
        return entry

    def score(self, text: str, entry: dict) -> float:
        """The score of `text` as an answer to `entry`, mostly from 0 to 1.

        An answer that makes the task's own scoring fail (one that does not parse as a number or a board) scores 0; the
        first such failure is logged.
        """
        try:
            return float(self._dataset.score_answer(final_answer(text, self.tag), entry))
        except Exception as error:  # caused by the model's text: nothing for the user to fix
            if not self._has_failed:
                _log.warning("warning: the scoring of reasoning_gym's %s fails on an answer (%s); such answers are "
                             "worth 0", self.task, one_line(error))
            self._has_failed = True
            return 0.0


def final_answer(text: str, tag: str | None) -> str | None:
    """The text between the last pair of <tag> and </tag>, or None; without a tag all of the text."""
    if tag is None:
        return text.strip()
    answers = re.findall(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", text, re.DOTALL)
    return answers[-1].strip() if answers else None


def task_rows(task: str, num_rows: int, settings: dict | None = None, instruction: str = INSTRUCTION,
              first: int = 0) -> list[dict]:
    """Rows for the reward function or the environment of this name: the prompt is the question and the instruction.

    Columns: prompt (messages), index, answer. Entries first to first + num_rows - 1, so that a test set can begin where
    the training set ends.
    """
    dataset = ReasoningTask(task, settings or {}, allow_eval=True)  # no answer of a model is scored here
    entries = {index: dataset.entry(index) for index in range(first, first + num_rows)}
    return [{"prompt": [{"role": "user", "content": f"{entry['question']}\n{instruction}".strip()}], "index": index,
             "answer": str(entry["answer"])} for index, entry in entries.items()]
