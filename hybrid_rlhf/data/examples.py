"""From canonical rows to training rows: demonstrations, pairs, prompts. What is lost is counted by reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import Encoded, Refused, Rendered, Text
from hybrid_rlhf.data.schema import Example

TOO_LONG = "longer than max_length"
PROMPT_TOO_LONG = "prompt longer than max_prompt_length"
CUT_AWAY = "answer cut away"
EMPTY = "empty answer"


class Lengths(NamedTuple):
    max_length: int
    max_prompt_length: int
    train_on: str
    score_template: str = ""


@dataclass
class Counts:
    """What became of the rows. dropped: reason -> number."""

    truncated: int = 0
    dropped: Counter = field(default_factory=Counter)


class Work(NamedTuple):
    """One training row before tokenizing: its texts, and what makes the row of their tokens (None: dropped)."""

    texts: list[Rendered]
    finish: Callable[[list[Encoded], Counts], dict | None]


def demonstration(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {input_ids, loss_mask}. A row too long loses its tail as long as a token to be trained stays."""
    finish = _imitated(lengths)
    if example.text is not None:
        _need_words(example.text, "empty text")
        yield Work([Rendered(example.text, [(0, len(example.text))], True)], finish)
    elif example.messages is not None:
        _need_words(next((m["content"] for m in reversed(example.messages) if m["role"] == "assistant"), "-"))
        messages = example.messages[: lengths.max_length]  # what lies behind is cut anyway: a turn is a token at least
        yield Work([chat.compose_messages(tokenizer, messages)], finish)
    else:
        completion, score = max(example.answers, key=lambda a: a[1])
        if len(example.answers) == 1 and score <= 0:
            raise Refused("labelled as a bad answer")
        yield Work([_composed(tokenizer, example.prompt, completion)], finish)


def _imitated(lengths: Lengths) -> Callable[[list[Encoded], Counts], dict | None]:
    def finish(encoded: list[Encoded], counts: Counts) -> dict | None:
        ids, mask, _ = encoded[0]
        mask = [True] * len(ids) if lengths.train_on == "all" else mask
        if not any(mask[1 : lengths.max_length]):
            counts.dropped[CUT_AWAY] += 1
            return None
        counts.truncated += len(ids) > lengths.max_length
        return {"input_ids": ids[: lengths.max_length], "loss_mask": mask[: lengths.max_length]}

    return finish


def graded(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {input_ids, loss_mask}, one per answer, good or bad: the score is written into the prompt."""
    for answer, score in example.answers:
        question = with_score(example.prompt or "", score, lengths.score_template)
        yield Work([_composed(tokenizer, question, answer)], _imitated(lengths))


def with_score(prompt: Text, score: float, template: str) -> Text:
    """The prompt that asks for an answer of this score: a string, or messages, whose last user turn says it."""
    if isinstance(prompt, str):
        return template.format(prompt=prompt, score=score)
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if last is None:
        raise Refused("no user turn to write the score into")
    asked = {**prompt[last], "content": template.format(prompt=prompt[last]["content"], score=score)}
    return [*prompt[:last], asked, *prompt[last + 1 :]]


def labelled(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {input_ids, loss_mask, num_prompt_tokens, label}; of several answers the best is desirable, the worst is not.

    A row too long is dropped: a cut answer would be judged as if it were whole.
    """
    ranked = sorted(example.answers, key=lambda a: -a[1])
    if len(ranked) > 1:
        if ranked[0][1] == ranked[-1][1]:
            raise Refused("no two answers of different score")
        answers = [(ranked[0][0], True), (ranked[-1][0], False)]
    else:
        answers = [(answer, score > 0) for answer, score in ranked]

    for answer, label in answers:

        def finish(encoded: list[Encoded], counts: Counts, label: bool = label) -> dict | None:
            ids, _, start = encoded[0]
            if len(ids) > lengths.max_length:
                counts.dropped[TOO_LONG] += 1
                return None
            return {"input_ids": ids, "loss_mask": [i >= start for i in range(len(ids))], "num_prompt_tokens": start,
                    "label": label}

        yield Work([_composed(tokenizer, example.prompt, answer)], finish)


def pair(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {chosen_ids, rejected_ids, num_prompt_tokens, num_prompt_tokens_rejected, margin}, one per two answers.

    A pair of which one side is too long is dropped: a cut answer would be judged as if it were whole.
    """

    def finish(encoded: list[Encoded], counts: Counts) -> dict | None:
        chosen, rejected = encoded
        if max(len(chosen.ids), len(rejected.ids)) > lengths.max_length:
            counts.dropped[TOO_LONG] += 1
            return None
        return {"chosen_ids": chosen.ids, "rejected_ids": rejected.ids, "num_prompt_tokens": chosen.num_prompt_tokens,
                "num_prompt_tokens_rejected": rejected.num_prompt_tokens, "margin": example.margin}

    ranked = sorted(example.answers, key=lambda a: -a[1])
    pairs = [(a, b) for (a, better), (b, worse) in combinations(ranked, 2) if better > worse and a != b]
    if not pairs:
        raise Refused("no two answers of different score")
    for better, worse in pairs:
        yield Work([_composed(tokenizer, example.prompt, a) for a in (better, worse)], finish)


def prompt(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {prompt_ids, text, rest}: rest is the original prompt and all other columns, as JSON (see `unfolded`)."""

    def finish(encoded: list[Encoded], counts: Counts) -> dict | None:
        ids = encoded[0].ids
        if len(ids) > lengths.max_prompt_length:
            counts.dropped[PROMPT_TOO_LONG] += 1
            return None
        rest = json.dumps({**example.columns, "prompt": example.prompt}, default=str)
        return {"prompt_ids": ids, "text": rendered.shown, "rest": rest}

    if not example.prompt:
        raise Refused("empty prompt")
    rendered = chat.compose_prompt(tokenizer, example.prompt)
    yield Work([rendered], finish)


def unfolded(row: dict) -> dict:
    """A stored row as the rest of the house sees it: the other columns of a prompt beside its ids and text."""
    if "rest" not in row:
        return row
    return {**json.loads(row["rest"]), "prompt_ids": row["prompt_ids"], "text": row["text"]}


def _composed(tokenizer, question: Text | None, answer: Text) -> Rendered:  # noqa: ANN001
    _need_words(answer if isinstance(answer, str) else answer[-1]["content"])
    return chat.compose(tokenizer, question or "", answer)


def _need_words(text: str, reason: str = EMPTY) -> None:
    if not text.strip():
        raise Refused(reason)


MAKERS: dict[str, Callable[..., Iterator[Work]]] = {
    "demonstration": demonstration, "pair": pair, "prompt": prompt, "labelled answer": labelled,
    "graded answer": graded}
PAIRWISE = ("reward", "dpo", "ipo", "hinge", "orpo", "simpo")
SAMPLING = ("ppo", "online_dpo", "rejection")
TRAININGS = {"sft": "demonstration", "ptx": "demonstration", **dict.fromkeys(SAMPLING, "prompt"),
             **dict.fromkeys(PAIRWISE, "pair"), "kto": "labelled answer",
             "conditional_sft": "graded answer"}  # stage -> kind of training
