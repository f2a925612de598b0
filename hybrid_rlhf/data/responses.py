"""Prompts with the responses that a file has to them, in any format that is read, to be judged; and pairs to write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.data import sources
from hybrid_rlhf.data.chat import SkipRow, Text
from hybrid_rlhf.data.files import loads
from hybrid_rlhf.data.labels import EMPTY, NO_PROMPT, TURNS, prompt_key, spoken
from hybrid_rlhf.data.messages import messages_of
from hybrid_rlhf.data.schema import KINDS, Example, Format, format_of, read_row
from hybrid_rlhf.data.source import Source

LISTS = ("completions", "responses")  # columns of several responses, whatever the row's format
TWICE = "the same response twice"
# columns that would make another format of a row of pairs, or say what is said anew
_TAKEN = {*LISTS, "prompt", "chosen", "rejected", "scores", "score_chosen", "score_rejected", "margin", "label",
          "response_j", "response_k", "output_1", "output_2", "completion", "response", "messages", "conversations"}


@dataclass
class Asked:
    """A prompt, the different responses to it as texts, and the row's other columns."""

    prompt: Text
    responses: list[str]
    columns: dict = field(default_factory=dict)


def read_asked(given: Sequence[Source], columns: Sequence[str] | None, with_responses: bool, lost: Counter
               ) -> list[Asked]:
    """The prompts of the sources, each once, in their order.

    columns: those that hold responses; None takes what the format of the rows calls answers, and LISTS. Rows of one
    prompt with one response each are put together. lost: reason -> how many rows or responses were left out.
    Raises UserError for what cannot be read or has no prompts.
    """
    found: list[Asked] = []
    singles: dict[str, Asked] = {}
    for source in given:
        rows = sources.read(source)
        form = format_of(rows, source.path)
        check("prompt" in KINDS[form.kind], f"{source.path} is {form.name} data ({', '.join(form.required)}), which "
                                            "has no prompts; give other data")
        for name in columns or ():
            check(name in rows[0], f"label: {source.path} has no column {name}{nearest(name, list(rows[0]))}; it has "
                                   f"{', '.join(map(str, rows[0]))}")
        for number, row in enumerate(rows, 1):
            each = _asked(row, form, f"{source.path} row {number}", columns, with_responses, lost)
            if each is None:
                continue
            own = singles.setdefault(prompt_key(each.prompt), each) if len(each.responses) < 2 else each
            if own is each:
                found.append(each)
            else:
                own.responses += _different([*own.responses, *each.responses], lost)[len(own.responses):]
    return found


def _asked(row: dict, form: Format, where: str, columns: Sequence[str] | None, with_responses: bool, lost: Counter
           ) -> Asked | None:
    try:
        example = read_row(row, form, where)
        if not example.prompt or example.is_text_pair:
            raise SkipRow(NO_PROMPT)
        said = _texts(row, example, columns, form.required) if with_responses else []
    except SkipRow as reason:
        lost[str(reason)] += 1
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}; fix the row") from error
    taken = _TAKEN.union(columns or ())
    kept = {name: value for name, value in example.columns.items() if name not in taken}
    return Asked(_plain(example), _different(said, lost), kept)


def _texts(row: dict, example: Example, columns: Sequence[str] | None, read: Sequence[str]) -> list[str | None]:
    """The responses of a row; None for one that is no single text. read: the columns that the format reads."""
    if columns is not None:
        return [text for name in columns for text in _of_value(row.get(name), name)]
    listed = [text for name in LISTS if name not in read for text in _of_value(row.get(name), name)]
    return listed or [spoken(answer) for answer, _ in example.answers]


def _of_value(value: object, column: str) -> list[str | None]:
    """The responses in a cell: a text, messages, or a list of either, which a table has as JSON text."""
    if value is None:
        return []
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = loads(value)
        except (ValueError, RecursionError):
            return [value]
        return _of_value(parsed, column) if isinstance(parsed, list) else [value]
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict) or (isinstance(value, list) and value and all(isinstance(v, dict) for v in value)):
        return [spoken(messages_of([value] if isinstance(value, dict) else value, column))]
    if isinstance(value, list):
        return [text for each in value for text in ([each] if isinstance(each, str) else _of_value(each, column))]
    raise SkipRow(f"a response in {column} that is no text")


def _different(said: Iterable[str | None], lost: Counter) -> list[str]:
    """The responses without empty ones and those that are there before."""
    found: list[str] = []
    for text in said:
        reason = TURNS if text is None else EMPTY if not text.strip() else TWICE if text in found else None
        if reason:
            lost[reason] += 1
        elif text is not None:
            found.append(text)
    return found


def add(asked: Asked, said: Iterable[str], lost: Counter) -> None:
    """Further responses, such as samples."""
    asked.responses += _different([*asked.responses, *said], lost)[len(asked.responses):]


def _plain(example: Example) -> Text:
    """The prompt without the tools that its first message carries: they have a column of their own."""
    prompt = example.prompt or ""
    if isinstance(prompt, str) or not example.tools:
        return prompt
    return [{k: v for k, v in prompt[0].items() if k != "tools"}, *prompt[1:]]


def pair_row(asked: Asked, chosen: str, rejected: str, more: dict) -> dict:
    """A preference in the form that is read as one: answers are in the prompt's form. more: further columns."""
    def said(text: str) -> Text:
        return text if isinstance(asked.prompt, str) else [{"role": "assistant", "content": text}]

    return {"prompt": asked.prompt, "chosen": said(chosen), "rejected": said(rejected), **asked.columns, **more}
