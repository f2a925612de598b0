"""Convert canonical rows to training rows: demonstrations, pairs, prompts. Dropped rows are counted by reason."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple, TypeVar

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import chat
from hybrid_rlhf.data.chat import Encoded, Rendered, SkipRow, Text
from hybrid_rlhf.data.messages import NO_READER, kwargs_of, with_tools
from hybrid_rlhf.data.question import flat
from hybrid_rlhf.data.row_images import SCALED, Files, resolved
from hybrid_rlhf.data.schema import REPEATED, UNTRAINED, Example
from hybrid_rlhf.data.turns import BREAK, broken, with_kwargs
from hybrid_rlhf.models.images import reader_of
from hybrid_rlhf.models.template import dialect_of, folds_system
from hybrid_rlhf.models.template_kwargs import KWARGS, split_kwargs

NUM_FIRST = 3  # dropped rows that are named, of each reason
TOO_LONG = "longer than data.max_length"
PROMPT_TOO_LONG = "prompt longer than data.max_prompt_length"
IMAGES_CUT = "images cut off by data.max_length"
CUT_AWAY = "no answer left within data.max_length"
EMPTY = "empty answer"
SAME = "no two answers of different score"
TURNS = "prompts of plain text rendered as user turns (data.raw true keeps them as they are)"
RAW = "prompts of plain text kept as they are (data.raw)"
NO_TEMPLATE = "prompts of plain text kept as they are, since the tokenizer has no chat template"
MARKED = "of these prompts hold special tokens as text; data.raw true is for prompts that are rendered already"
TOOLS_LEFT_OUT = "prompts kept as they are, beside which the column tools is not read"
KWARGS_LEFT_OUT = "rows of plain text, beside which the column chat_template_kwargs is not read"
KWARGS_UNREAD = "rows whose chat_template_kwargs hold what the chat template does not read"
FOLDED = "system messages put into the first user turn, since the chat template takes none"
TURN_BY_TURN = "conversations as one row per answer, since the chat template rewrites earlier turns"


AnswerT = TypeVar("AnswerT")


class Lengths(NamedTuple):
    max_length: int
    max_prompt_length: int
    train_on: str
    score_template: str = ""
    raw: bool = False


@dataclass
class Counts:
    """Counts of rows. dropped: reason -> number, first: and the first rows. rendered: how they were rendered ->
    number. unread: unused column -> rows in which it has text. row: of the source, the one in work."""

    truncated: int = 0
    row: int = 0
    dropped: Counter = field(default_factory=Counter)
    first: dict[str, list[int]] = field(default_factory=dict)
    rendered: Counter = field(default_factory=Counter)
    unread: Counter = field(default_factory=Counter)

    def drop(self, reason: str, row: int | None = None) -> None:
        """Count a dropped row: the one in work, or another. A row of several conversations is named once."""
        row = self.row if row is None else row
        self.dropped[reason] += 1
        if len(first := self.first.setdefault(reason, [])) < NUM_FIRST and row not in first:
            first.append(row)


class Work(NamedTuple):
    """One training row before tokenizing: its texts, and a function from their tokens to the row (None: dropped)."""

    texts: list[Rendered]
    finish: Callable[[list[Encoded], Counts], dict | None]


def prepared(example: Example, tokenizer, lengths: Lengths, counts: Counts, files: Files) -> Example:  # noqa: ANN001
    """The row in the form to be rendered: where the tokenizer has a chat template, a string prompt becomes a user's
    turn and a string answer the assistant's, unless `raw`. Texts without a question always stay plain. files: where
    images are. Raises SkipRow for images that cannot be read, and for any if the model reads none."""
    is_plain = example.text is not None or example.is_text_pair
    counts.rendered.update(example.notes)
    counts.unread.update(example.unread)
    kwargs = kwargs_of(example.columns.get(KWARGS))
    if not is_plain and isinstance(example.prompt, str):
        has_turns = bool(tokenizer.chat_template) and not lengths.raw
        counts.rendered[TURNS if has_turns else RAW if lengths.raw else NO_TEMPLATE] += 1
        if has_turns:
            if BREAK in broken(tokenizer, example.prompt):
                counts.rendered[MARKED] += 1
            answers = [(answer if not isinstance(answer, str) else answer.lstrip() if REPEATED in example.notes else
                        answer.removeprefix(" "), score) for answer, score in example.answers]
            turns = with_tools(chat.as_turn(tokenizer, example.prompt), example.tools)
            # `written` would lose the tools, which sampling needs
            example = replace(example, prompt=turns, answers=answers, written=None if example.tools else example.prompt)
        elif example.tools:
            counts.rendered[TOOLS_LEFT_OUT] += 1
    if kwargs:
        example = replace(example, prompt=with_kwargs(example.prompt, kwargs),
                          messages=with_kwargs(example.messages, kwargs), written=None)  # which would lose them
    if example.images:
        example = _with_images(example, tokenizer, counts, files)
    messages = example.messages or example.prompt
    if kwargs and not isinstance(messages, list):
        counts.rendered[KWARGS_LEFT_OUT] += 1
    elif split_kwargs(tokenizer, kwargs)[1]:
        counts.rendered[KWARGS_UNREAD] += 1
    if isinstance(messages, list) and folds_system(messages, dialect_of(tokenizer)):
        counts.rendered[FOLDED] += 1
    return example


def _with_images(example: Example, tokenizer, counts: Counts, files: Files) -> Example:  # noqa: ANN001
    if reader_of(tokenizer) is None:
        raise SkipRow(NO_READER)
    turns, num_scaled = resolved(example.messages or example.prompt, files)
    counts.rendered += Counter({SCALED: num_scaled})
    return replace(example, prompt=example.prompt and turns[: len(example.prompt)],
                   messages=example.messages and turns)


def demonstration(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {input_ids, loss_mask}, and as every kind with images {images}: [path, width, height] each. A row that is too
    long is truncated, if a token to be trained stays."""
    finish = _sft_row(lengths)
    if example.text is not None:
        _require_text(example.text, "empty text")
        yield Work([Rendered(example.text, [(0, len(example.text))], True)], finish)
    elif lengths.train_on == "all" and UNTRAINED in example.notes:
        raise UserError("data.train_on is all, and some answers are marked as not to be trained (weight 0); choose "
                        "response")
    elif example.messages is not None:
        _require_text(_last_text(example.messages))
        messages = example.messages[: lengths.max_length]  # later ones are cut anyway: a turn has at least a token
        yield from _per_text(chat.compose_messages(tokenizer, messages), lengths)
    else:
        if not example.answers:
            raise SkipRow("no answer")
        completion, score = max(example.answers, key=lambda a: a[1])
        if len(example.answers) == 1 and score <= 0:
            raise SkipRow("labelled as a bad answer")
        yield from _per_text(chat.compose_all(tokenizer, example.prompt or "", _answered(completion)), lengths)


def _per_text(texts: list[Rendered], lengths: Lengths) -> Iterator[Work]:
    """A row for each text of a conversation; where all tokens are trained only for the last, which has all turns."""
    if lengths.train_on == "all":
        texts = texts[-1:]
    for number, text in enumerate(texts):
        yield Work([text], _sft_row(lengths, is_split=len(texts) > 1 and number == 0))


def _sft_row(lengths: Lengths, is_split: bool = False) -> Callable[[list[Encoded], Counts], dict | None]:
    def finish(encoded: list[Encoded], counts: Counts) -> dict | None:
        if is_split:
            counts.rendered[TURN_BY_TURN] += 1
        ids, mask = encoded[0][:2]
        mask = [True] * len(ids) if lengths.train_on == "all" else mask
        if not any(mask[1 : lengths.max_length]):
            counts.drop(CUT_AWAY)
            return None
        if encoded[0].images_end > lengths.max_length:
            counts.drop(IMAGES_CUT)
            return None
        counts.truncated += len(ids) > lengths.max_length
        return {"input_ids": ids[: lengths.max_length], "loss_mask": mask[: lengths.max_length], **_images(encoded[0])}

    return finish


def _images(encoded: Encoded) -> dict:
    """The images of a row, where it has any."""
    return {"images": [list(image) for image in encoded.images]} if encoded.images else {}


def graded(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {input_ids, loss_mask}, one per answer, good or bad, with the score in the prompt."""
    for answer, score in example.answers:
        question = with_score(example.prompt or "", score, lengths.score_template)
        yield from _per_text(chat.compose_all(tokenizer, question, _answered(answer)), lengths)


def with_score(prompt: Text, score: float, template: str) -> Text:
    """The prompt with a requested score: a string, or messages with the score in the last user turn."""
    if isinstance(prompt, str):
        return template.format(prompt=prompt, score=score)
    last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
    if last is None:
        raise SkipRow("no user turn to write the score into")
    asked = {**prompt[last], "content": template.format(prompt=prompt[last]["content"], score=score)}
    return [*prompt[:last], asked, *prompt[last + 1 :]]


def labelled(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {input_ids, loss_mask, num_prompt_tokens, label}; of several answers the best is desirable, the worst is not.

    A row that is too long is dropped: a truncated answer would be judged as if it were complete.
    """
    ranked = sorted(example.answers, key=lambda a: -a[1])
    if len(ranked) > 1:
        if ranked[0][1] == ranked[-1][1]:
            raise SkipRow(SAME)
        answers = [(ranked[0][0], True), (ranked[-1][0], False)]
    else:
        answers = [(answer, score > 0) for answer, score in ranked]

    for answer, label in answers:

        def finish(encoded: list[Encoded], counts: Counts, label: bool = label) -> dict | None:
            ids, mask, start = encoded[0][:3]
            if len(ids) > lengths.max_length:
                counts.drop(TOO_LONG)
                return None
            return {"input_ids": ids, "loss_mask": mask, "num_prompt_tokens": start, "label": label,
                    **_images(encoded[0])}

        yield Work([chat.compose(tokenizer, example.prompt or "", _answered(answer))], finish)


def pair(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {chosen_ids, rejected_ids, chosen_mask, rejected_mask, num_prompt_tokens, num_prompt_tokens_rejected, margin},
    one per two answers. The masks mark the assistant's turns.

    A pair with a side that is too long is dropped: a truncated answer would be judged as if it were complete.
    """

    def finish(encoded: list[Encoded], counts: Counts) -> dict | None:
        chosen, rejected = encoded
        if max(len(chosen.ids), len(rejected.ids)) > lengths.max_length:
            counts.drop(TOO_LONG)
            return None
        return {"chosen_ids": chosen.ids, "rejected_ids": rejected.ids, "chosen_mask": chosen.loss_mask,
                "rejected_mask": rejected.loss_mask, "num_prompt_tokens": chosen.num_prompt_tokens,
                "num_prompt_tokens_rejected": rejected.num_prompt_tokens, "margin": example.margin, **_images(chosen)}

    pairs = ranked_pairs(example.answers)
    if not pairs:
        raise SkipRow(SAME)
    for better, worse in pairs:
        yield Work([chat.compose(tokenizer, example.prompt or "", _answered(a)) for a in (better, worse)], finish)


def ranked_pairs(answers: Sequence[tuple[AnswerT, float]]) -> list[tuple[AnswerT, AnswerT]]:
    """Every two different answers of different score, the better one first."""
    ranked = sorted(answers, key=lambda answer: -answer[1])
    return [(a, b) for (a, better), (b, worse) in combinations(ranked, 2) if better > worse and a != b]


def prompt(example: Example, tokenizer, lengths: Lengths) -> Iterator[Work]:  # noqa: ANN001
    """-> {prompt_ids, text, rest}: rest is the row's original prompt and all other columns, as JSON (see
    `decode_columns`)."""

    def finish(encoded: list[Encoded], counts: Counts) -> dict | None:
        ids = encoded[0].ids
        if len(ids) > lengths.max_prompt_length:
            counts.drop(PROMPT_TOO_LONG)
            return None
        rest = json.dumps({**example.columns, "prompt": written}, default=str)
        return {"prompt_ids": ids, "text": rendered.shown, "rest": rest, **_images(encoded[0])}

    written = example.prompt if example.written is None else example.written
    if not written or (isinstance(example.prompt, list) and not flat(example.prompt).strip()):
        raise SkipRow("empty prompt")
    rendered = chat.compose_prompt(tokenizer, example.prompt)
    yield Work([rendered], finish)


def decode_columns(row: dict) -> dict:
    """A stored row with the columns in `rest` decoded, beside a prompt's ids and text."""
    if "rest" not in row:
        return row
    return {**json.loads(row["rest"]), **{name: value for name, value in row.items() if name != "rest"}}


def _answered(answer: Text) -> Text:
    """The answer. SkipRow for one without text."""
    _require_text(answer if isinstance(answer, str) else _last_text(answer))
    return answer


def _last_text(messages: list[dict]) -> str:
    """The text of the last assistant message; "-" for tool calls, or if there is none (rendering reports that)."""
    last = next((m for m in reversed(messages) if m["role"] == "assistant"), {"content": "-"})
    return last["content"] or ("-" if last.get("tool_calls") else "")


def _require_text(text: str, reason: str = EMPTY) -> None:
    if not text.strip():
        raise SkipRow(reason)


MAKERS: dict[str, Callable[..., Iterator[Work]]] = {
    "demonstration": demonstration, "pair": pair, "prompt": prompt, "labelled answer": labelled,
    "graded answer": graded}
