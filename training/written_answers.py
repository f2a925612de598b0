"""Score answers from a file: make a rollout of them, as reward sources expect, without sampling."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.rewards import BadAnswer, RewardSource, part_scores
from hybrid_rlhf.rewards.functions import FunctionSource, parameters
from hybrid_rlhf.rewards.judge import JudgeSource
from hybrid_rlhf.rollout import Prompts, Rollout

_OURS = ("prompt", "prompts", "completions", "completion_ids")


def scores_of(source: RewardSource, prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict],
              tokenizer=None, batch_size: int = 256, owners: Sequence[int] | None = None  # noqa: ANN001
              ) -> list[float | None]:
    """A source's score of each answer, None where it skipped one. columns: the other columns of each row; tokenizer:
    for functions that read completion_ids; owners: one number for the answers to one prompt that are scored relative to
    each other, which must be adjacent and in one batch (None: each by itself)."""
    owners = range(len(answers)) if owners is None else owners
    if hasattr(source, "policy_tokenizer"):  # a process reward model, which may have another policy's from before
        source.policy_tokenizer = tokenizer
    scores: list[float | None] = []
    for first in range(0, len(answers), batch_size):
        part = slice(first, first + batch_size)
        scores += _batch(source, prompts[part], answers[part], columns[part], owners[part], tokenizer)
    return scores


def _batch(source: RewardSource, prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict],
           owners: Sequence[int], tokenizer) -> list[float | None]:  # noqa: ANN001
    """The scores of a few answers. An answer that a model cannot read (too many tokens, perhaps) has none: one line."""
    try:
        scores = part_scores(source, rollout_of(prompts, answers, columns, owners, tokenizer)).tolist()
    except UserError as error:
        if isinstance(error, BadAnswer) or isinstance(source, JudgeSource):
            raise
        if len(answers) == 1:
            print(f"no score for an answer: {error}", file=sys.stderr)
            return [None]
        return [score for i in range(len(answers)) for score in _batch(
            source, prompts[i : i + 1], answers[i : i + 1], columns[i : i + 1], owners[i : i + 1], tokenizer)]
    return [None if score != score else score for score in scores]


def rollout_of(prompts: Sequence[Text], answers: Sequence[str], columns: Sequence[dict], owners: Sequence[int],
               tokenizer=None) -> Rollout:  # noqa: ANN001
    """The answers as responses that ended; those of one owner are samples of one prompt, as judges see it. Without a
    tokenizer the token ids are placeholders, and only sources that read text may score the rollout
    (`check_sources`)."""
    names = dict.fromkeys(name for row in columns for name in row if name not in _OURS)
    extra = {name: [row.get(name) for row in columns] for name in names} | {"prompt": list(prompts)}
    ids = [tokenizer(answer, add_special_tokens=False)["input_ids"] if tokenizer else [] for answer in answers]
    texts = [prompt if isinstance(prompt, str) else "\n\n".join(m["content"] for m in prompt) for prompt in prompts]
    shared: dict[int, list[int]] = {}
    asked = Prompts([shared.setdefault(owner, [0]) for owner in owners], texts, extra)
    return Rollout.from_responses(asked, [row or [0] for row in ids], [True] * len(answers), 0, list(answers))


def check_sources(sources: Sequence[RewardSource], columns: Sequence[dict], tokenizer, option: str  # noqa: ANN001
                  ) -> None:
    """UserError for a function that needs a column which the rows do not have, or tokens where there is no tokenizer.
    option: where the rows come from."""
    names = [name for name in dict.fromkeys(n for row in columns for n in row) if name not in _OURS]
    for source in sources:
        if isinstance(source, FunctionSource):
            source.check_columns(names)
            check(tokenizer is not None or "completion_ids" not in parameters(source.function)[0],
                  f"{option}: {source.name} reads completion_ids, and there is no tokenizer to make them; name a "
                  "model, or let the function read completions")
