"""Read labelled answers, to measure judges by, and prompts with responses, in the formats that training reads."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.data import sources
from hybrid_rlhf.data.chat import SkipRow, Text
from hybrid_rlhf.data.examples import SAME, ranked_pairs
from hybrid_rlhf.data.loader import is_held_out, split_key
from hybrid_rlhf.data.messages import WITH_MEDIA, messages_of
from hybrid_rlhf.data.schema import KINDS, Example, Format, format_of, read_row, read_rows
from hybrid_rlhf.data.sources import Source

NO_PROMPT, TURNS = "no prompt", "an answer of several turns"
EMPTY, ONE = "an empty answer", "one answer alone, beside pairs"
LISTS = ("completions", "responses")  # columns of several responses, whatever the row's format
TWICE = "the same response twice"
# columns that would change the format of a row of pairs, or repeat it
_TAKEN = {*LISTS, "prompt", "chosen", "rejected", "scores", "score_chosen", "score_rejected", "margin", "label",
          "response_j", "response_k", "output_1", "output_2", "completion", "response", "messages", "conversations"}


class LabelledPair(NamedTuple):
    """Two answers as texts; by its label the first is better. prompt_number: equal for pairs of one prompt.
    columns: the row's other columns, for reward functions."""

    prompt: Text
    better: str
    worse: str
    columns: dict
    prompt_number: int


class LabelledAnswer(NamedTuple):
    """An answer with a label, higher being better."""

    prompt: Text
    answer: str
    label: float
    columns: dict
    prompt_number: int


@dataclass
class Labels:
    """Pairs, or answers where no row has two answers to compare. lost: reason -> number of rows or answers left out;
    read: rows of the file; is_held_out: whether only rows that training holds out were read."""

    read: int
    pairs: list[LabelledPair] = field(default_factory=list)
    answers: list[LabelledAnswer] = field(default_factory=list)
    lost: Counter = field(default_factory=Counter)
    is_held_out: bool = False


def read_labels(source: Source, limit: int | None, seed: int, held_out: float | None = None) -> Labels:
    """The labels of a file or folder, of at most `limit` rows, sampled by `seed`. held_out: only the rows that a stage
    with this data.eval_fraction holds out.

    Raises UserError for data without labels (formats of kind preference or unpaired have them), or without usable ones.
    """
    rows = sources.read(source)
    form = format_of(rows, source.path)
    check("graded answer" in KINDS[form.kind],
          f"{source.path} is {form.name} data ({', '.join(form.required)}), which holds no labels; give "
          "prompt+chosen+rejected, prompt+completions+scores or prompt+completion+label")
    labels = Labels(len(rows), is_held_out=held_out is not None)
    readable = list(read_rows(rows, form, source.path, lambda reason, _row: labels.lost.update([reason])))
    asking = [example for example in readable if example.prompt and not example.is_text_pair]
    examples = [example for example in asking if not example.images]
    labels.lost += Counter({NO_PROMPT: len(readable) - len(asking), WITH_MEDIA: len(asking) - len(examples)})
    if held_out is not None:
        examples = [example for example in examples if is_held_out(split_key(example), held_out)]
        check(bool(examples), f"{source.path}: none of its rows is held out (data.eval_fraction {held_out:g}); raise "
                              "it, or read all of them by --evaluate.rows all")
    if limit is not None and limit < len(examples):
        examples = [examples[i] for i in sorted(random.Random(seed).sample(range(len(examples)), limit))]
    numbers: dict[str, int] = {}
    for example in examples:
        number = numbers.setdefault(prompt_key(example.prompt), len(numbers))
        labels.pairs += _pairs(example, number, labels.lost)
    single = [example for example in examples if len(example.answers) == 1]
    if labels.pairs:
        labels.lost += Counter({ONE: len(single)} if single else {})
    else:
        labels.answers = [item for e in single for item in _answers(e, numbers[prompt_key(e.prompt)])]
        check(not labels.answers or len({item.label for item in labels.answers}) > 1,
              f"{source.path}: every answer has the same label; give good and bad ones")
    check(bool(labels.pairs or labels.answers), f"{source.path}: no label can be used: "
          + ", ".join(f"{n} x {reason}" for reason, n in labels.lost.items()) + "; give other data")
    return labels


def _pairs(example: Example, number: int, lost: Counter) -> Iterator[LabelledPair]:
    """Every two answers of different score."""
    answers = _usable(example, lost)
    pairs = ranked_pairs(answers)
    if len(answers) > 1 and not pairs:
        lost[SAME] += 1
    for better, worse in pairs:
        yield LabelledPair(example.prompt or "", better, worse, example.columns, number)


def _answers(example: Example, number: int) -> Iterator[LabelledAnswer]:
    for answer, label in _usable(example, Counter()):  # counted before
        yield LabelledAnswer(example.prompt or "", answer, label, example.columns, number)


def _usable(example: Example, lost: Counter) -> list[tuple[str, float]]:
    """The answers as texts, without empty ones and those of several turns."""
    out = []
    for answer, score in example.answers:
        text = spoken(answer)
        if text is None or not text.strip():
            lost[TURNS if text is None else EMPTY] += 1
        else:
            out.append((text, score))
    return out


def spoken(answer: Text) -> str | None:
    """An answer's text: a string, or the content of one assistant message; None with other turns or tool calls."""
    if isinstance(answer, str):
        return answer
    is_one = len(answer) == 1 and answer[0]["role"] == "assistant" and not answer[0].get("tool_calls")
    return answer[0]["content"] if is_one else None


def prompt_key(prompt: Text | None) -> str:
    """A key for a prompt, independent of the order of a message's keys."""
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)


@dataclass
class Asked:
    """A prompt, the different responses to it as texts, and the row's other columns."""

    prompt: Text
    responses: list[str]
    columns: dict = field(default_factory=dict)


def read_asked(files: Sequence[Source], columns: Sequence[str] | None, with_responses: bool, lost: Counter
               ) -> list[Asked]:
    """The prompts of the sources, each once, in their order.

    columns: those that hold responses; None takes the answers of the rows' format, and LISTS. Rows with the same prompt
    and one response each are merged. lost: reason -> number of rows or responses left out. Raises UserError for files
    that cannot be read or have no prompts.
    """
    prompts: list[Asked] = []
    singles: dict[str, Asked] = {}
    for source in files:
        rows = sources.read(source)
        form = format_of(rows, source.path)
        check("prompt" in KINDS[form.kind], f"{source.path} is {form.name} data ({', '.join(form.required)}), which "
                                            "has no prompts; give other data")
        for name in columns or ():
            check(name in rows[0], f"label: {source.path} has no column {name}{nearest(name, list(rows[0]))}; it has "
                                   f"{', '.join(map(str, rows[0]))}")
        for number, row in enumerate(rows, 1):
            asked = _asked(row, form, f"{source.path} row {number}", columns, with_responses, lost)
            if asked is None:
                continue
            first = singles.setdefault(prompt_key(asked.prompt), asked) if len(asked.responses) < 2 else asked
            if first is asked:
                prompts.append(asked)
            else:
                add(first, asked.responses, lost)
    return prompts


def _asked(row: dict, form: Format, where: str, columns: Sequence[str] | None, with_responses: bool, lost: Counter
           ) -> Asked | None:
    try:
        example = read_row(row, form, where)
        if not example.prompt or example.is_text_pair:
            raise SkipRow(NO_PROMPT)
        if example.images:
            raise SkipRow(WITH_MEDIA)
        texts = _texts(row, example, columns, form.required) if with_responses else []
    except SkipRow as reason:
        lost[str(reason)] += 1
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}; fix the row") from error
    taken = _TAKEN.union(columns or ())
    kept = {name: value for name, value in example.columns.items() if name not in taken}
    return Asked(_plain(example), _different(texts, lost), kept)


def _texts(row: dict, example: Example, columns: Sequence[str] | None, read: Sequence[str]) -> list[str | None]:
    """The responses of a row; None for one that is not a single text. read: the columns that the format reads."""
    if columns is not None:
        return [text for name in columns for text in _of_value(row.get(name), name)]
    listed = [text for name in LISTS if name not in read for text in _of_value(row.get(name), name)]
    return listed or [spoken(answer) for answer, _ in example.answers]


def _of_value(value: object, column: str) -> list[str | None]:
    """The responses in a cell: a text, messages, or a list of either, possibly as JSON text."""
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = loads(value)
        except ValueError:
            return [value]
        return _of_value(parsed, column) if isinstance(parsed, list) else [value]
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict) or (isinstance(value, list) and value and all(isinstance(v, dict) for v in value)):
        return [spoken(messages_of([value] if isinstance(value, dict) else value, column))]
    if isinstance(value, list):
        return [text for item in value for text in ([item] if isinstance(item, str) else _of_value(item, column))]
    raise SkipRow(f"a response in {column} that is not text")


def _different(texts: Iterable[str | None], lost: Counter) -> list[str]:
    """The responses without empty ones and duplicates."""
    distinct: list[str] = []
    for text in texts:
        reason = TURNS if text is None else EMPTY if not text.strip() else TWICE if text in distinct else None
        if reason:
            lost[reason] += 1
        elif text is not None:
            distinct.append(text)
    return distinct


def add(asked: Asked, texts: Iterable[str], lost: Counter) -> None:
    """Add responses, such as samples."""
    asked.responses += _different([*asked.responses, *texts], lost)[len(asked.responses):]


def _plain(example: Example) -> Text:
    """The prompt without the tools in its first message: they have a column of their own."""
    prompt = example.prompt or ""
    if isinstance(prompt, str) or not example.tools:
        return prompt
    return [{k: v for k, v in prompt[0].items() if k != "tools"}, *prompt[1:]]


def pair_row(asked: Asked, chosen: str, rejected: str, more: dict) -> dict:
    """A preference as a row of data: answers are in the prompt's form. more: further columns."""
    def answer(text: str) -> Text:
        return text if isinstance(asked.prompt, str) else [{"role": "assistant", "content": text}]

    return {"prompt": asked.prompt, "chosen": answer(chosen), "rejected": answer(rejected), **asked.columns, **more}
