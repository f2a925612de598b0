"""A reward model for the server's /score, which rewards/service.py calls."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.data.chat import Rendered, SkipRow, Text, as_turn, compose, encode_first
from hybrid_rlhf.models.load import max_positions
from hybrid_rlhf.rewards.model import ClassifierSource
from hybrid_rlhf.rollout import Prompts, Rollout

PART = 8  # responses scored between two decode steps


class Scorer:
    """The sequence-classification model at `path` with its own tokenizer and template; scores are not scaled."""

    def __init__(self, path: str, label: str | None = None) -> None:
        self.source = ClassifierSource(path, "reward_model", label=label, batch_size=PART)

    def open(self) -> None:
        self.source.open()
        self._reader = copy.deepcopy(self.source.tokenizer)  # lengths are checked in another thread than scores

    def check_lengths(self, prompts: list[Text], completions: list[str]) -> None:
        """UserError for inputs with more tokens than the model has positions, of which only the first ones are made."""
        limit = max_positions(self.source.model)
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            with suppress(SkipRow):  # reported by `score`
                rendered = self._rendered(prompt, completion)._replace(spans=[])  # without EOS
                count = 0 if limit is None else len(encode_first(self._reader, [rendered], limit + 1)[0].ids)
                check(limit is None or count <= limit,
                      f"prompts.{number} and its completion are {count} or more tokens long, and the reward model has "
                      f"{limit} positions; send less")

    def _rendered(self, prompt: Text, completion: str) -> Rendered:
        if self._reader.chat_template or isinstance(prompt, str):
            return compose(self._reader, as_turn(self._reader, prompt), completion)
        return Rendered("\n\n".join([*(m["content"] for m in prompt), completion]), [], True)  # as the source joins

    def parts(self, prompts: list[Text], completions: list[str]) -> Iterator[Callable[[], list[float]]]:
        """Functions that score PART pairs each, in order."""
        for start in range(0, len(prompts), PART):
            yield partial(self.score, prompts[start : start + PART], completions[start : start + PART])

    def score(self, prompts: list[Text], completions: list[str]) -> list[float]:
        """One score for each prompt and response. UserError for messages that the template refuses."""
        count = len(prompts)
        rollout = Rollout.from_responses(Prompts([[]] * count, [""] * count, {"prompt": prompts}), [[0]] * count,
                                         [True] * count, 0, completions)
        try:
            scores = list(map(float, self.source.score(rollout)))
        except SkipRow as error:
            raise UserError(f"these messages make no prompt: {error}; "
                            "send messages that the reward model's template takes") from error
        if not all(map(math.isfinite, scores)):
            raise RuntimeError("the reward model's scores are not finite")
        return scores
