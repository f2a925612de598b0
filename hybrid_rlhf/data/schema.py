"""The table of data formats; every reader converts a row to one of a few canonical kinds.

A new format is one reader and one row in TABLE. `prompt`, `completion`, `chosen` and `rejected` are strings, kept
unchanged, or messages: a list of {"role", "content"}, or its JSON text. Instruction formats, whose columns are not to
be concatenated, become messages. question.py builds the prompt in the same way for every format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.data.chat import SkipRow, Text
from hybrid_rlhf.data.messages import (
    Plain,
    assistant,
    clean,
    common_prompt,
    common_text,
    has_media,
    is_transcript,
    is_untrained,
    media_of,
    messages_of,
    parse_transcript,
    parsed_messages,
    tools_of,
    user,
    with_tools,
    without_images,
)
from hybrid_rlhf.data.question import PARTS, Question, beside, flat, looks_like_a_prompt, question_of, without_system
from hybrid_rlhf.data.row_images import NO_TURN, SAID, bare, column_of, listed, placed, sources_in


@dataclass
class Example:
    """One canonical row. Which fields are set depends on its kind (KINDS).

    answers: (completion, score) pairs, of which a higher score is better; only their order counts.
    rests: answers without the prompt, if they are strings that all begin with it.
    is_text_pair: the prompt is only the common prefix of two plain texts, and not a question.
    written: the prompt as it is in the row, if it is rendered in another form: text that becomes a user's turn.
    tools: the schemas of the available tools, which messages already contain.
    images: the row's images in their order, as it names them; those of its messages are in them too.
    columns: the row's other columns, passed on to reward functions.
    used: the columns of the prompt; unread: those with text that no field contains.
    notes: unexpected conversions of the row -> how often in it.
    row: its number in the source, from 1.
    """

    prompt: Text | None = None
    answers: list[tuple[Text, float]] = field(default_factory=list)
    rests: list[tuple[Text, float]] = field(default_factory=list)
    messages: list[dict] | None = None
    text: str | None = None
    margin: float = 0.0
    is_text_pair: bool = False
    written: Text | None = None
    tools: list[dict] = field(default_factory=list)
    images: list = field(default_factory=list)
    columns: dict = field(default_factory=dict)
    used: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    notes: dict[str, int] = field(default_factory=dict)
    row: int = 0


class Format(NamedTuple):
    """required: columns that identify the format (in TABLE with alternatives, a|b); read: converts a row to an Example,
    called with the columns of required; is_repeating: whether a source's answers begin with the prompt."""

    name: str
    required: tuple[str, ...]
    kind: str
    read: Callable[..., Example]
    is_repeating: bool = False

    @property
    def asks(self) -> tuple[str, ...]:
        """The columns of the prompt, which are not passed on with it."""
        columns = tuple(c for c in self.required if c in (*PARTS, *CONVERSATIONS, "text"))
        return (*columns, "input") if "instruction" in columns else columns


# kind of row -> the kinds of training examples that it can give.
KINDS: dict[str, tuple[str, ...]] = {
    "text": ("demonstration",),
    "conversation": ("demonstration", "prompt"),
    "demonstration": ("demonstration", "prompt"),
    # the best answer is a demonstration
    "preference": ("demonstration", "pair", "prompt", "labelled answer", "graded answer"),
    # a good answer is a demonstration, a bad one is not
    "unpaired": ("demonstration", "prompt", "labelled answer", "graded answer"),
    "prompt": ("prompt",),
}


ANSWERS = ("answer", "answers")  # one, several or none
CONVERSATIONS = ("messages", "conversations", "conversation")
_KNOWN = ("tools", "margin", "chat_template_kwargs", "environment")  # read elsewhere
LOOKED_AT = 100  # rows from which a property of all is inferred
SEVERAL_WORDS = 3  # a question, not a name
BY_SIGN = (-1, 1)  # of a preference: negative for the first answer
JOINED = "prompts joined from the columns "
REPEATED = "rows whose answers begin with the prompt, which is taken off"
EMPTY = "rows with an empty question"
UNTRAINED = "answers that are marked as not to be trained, and are not (weight 0)"


# Formats suggested in an error; docs/guide/your-own-data.md lists all.
_SUGGESTED = ("messages", "prompt+completion", "instruction+output", "question+answer", "prompt+chosen+rejected",
              "prompt+completion+label", "prompt", "text")


def detect(columns: Iterable[str], where: str) -> Format:
    """The first format of the table whose required columns all exist.

    Raises UserError, which lists the columns and formats that would fit.
    """
    names = [str(c) if str(c).isprintable() else repr(c) for c in columns]
    for row in FORMATS:
        if all(c in names for c in row.required):
            return row
    known = " | ".join(_SUGGESTED)
    shown = [name[:60] for name in names[:20]] + [f"and {len(names) - 20} more"] * (len(names) > 20)
    raise UserError(f"{where}: columns {', '.join(shown) or '(none)'} fit no known format; what would fit: "
                    f"{known}; or name yours: {columns_hint(where, shown)}")


def columns_hint(path: str, columns: Sequence[str], names: Sequence[str] = ("prompt", "completion")) -> str:
    """The option that maps a source's columns to `names`, with the first columns as an example."""
    pairs = ", ".join(f"{name}: {column}" for name, column in zip(names, columns, strict=False))
    return f'--data.sources "{{path: {path}, columns: {{{pairs or "prompt: question"}}}}}"'


def format_of(rows: Iterable[dict], where: str) -> Format:
    """The format of a source, by its first row, and whether its answers repeat the prompt: in all of the first
    rows, since a single answer may do so by chance. Raises UserError for pairs of text beside a column that looks like
    a prompt."""
    form, examples = detect(next(iter(rows)), where), []
    for row in islice(rows, LOOKED_AT) if form.kind == "preference" else ():
        with suppress(SkipRow, UserError):  # raised again when the row is read
            examples.append(read_row(row, form, where))
    pairs = [example for example in examples if example.is_text_pair]
    asking = Counter(name for example in pairs for name in example.unread if looks_like_a_prompt(name)
                     and len(str(example.columns[name]).split()) >= SEVERAL_WORDS)
    for name, number in asking.items():
        check(2 * number <= len(pairs), f"{where}: {' and '.join(form.required)} are texts without a prompt, beside "
              f"the column {name}; name it if that is it, {columns_hint(where, [name])}, else rename it")
    asked = [example for example in examples if example.prompt and not example.is_text_pair]
    return form._replace(is_repeating=bool(asked) and all(example.rests for example in asked))


def read_row(row: dict, form: Format, where: str, is_raw: bool = False) -> Example:
    """Convert a row to canonical form. is_raw: a string stays one, a transcript too, without the system column. Raises
    SkipRow for a row to drop and count, UserError for a wrong type."""
    for column in form.required:
        if column not in row:
            raise UserError(f"{where}: column {column} is missing ({form.name} needs {', '.join(form.required)})")
        if row[column] is None and not (column in ANSWERS and form.kind == "demonstration"):
            raise SkipRow(f"no {column}")
    column = column_of(row)
    text = without_images(row) if column else row
    if has_media(text):
        raise SkipRow(media_of(text))
    try:
        shown = without_system(row) if is_raw and "prompt" in form.required else row
        if is_raw:
            shown = {name: Plain(value) if isinstance(value, str) else value for name, value in shown.items()}
        example = form.read(shown, *form.required)
        if form.is_repeating and example.rests:
            example.answers, example.notes[REPEATED] = example.rests, 1
        _place_images(example, listed(row[column]) if column else [], is_raw)
        has_turns = example.text is None and not example.is_text_pair
        example.tools = tools_of(row.get("tools")) if has_turns else []
        example.prompt, example.messages = (with_tools(part, example.tools)
                                            for part in (example.prompt, example.messages))
        example.written = None if example.images else _as_text(row, example)
        example.unread = _unread(text, example, {*form.required} - {*form.asks} | {*example.used, *_KNOWN})
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}; fix the row") from error
    if len(example.used) > 1:
        example.notes[JOINED + ", ".join(example.used)] = 1
    if example.prompt is not None and not example.is_text_pair and not flat(example.prompt).strip():
        example.notes[EMPTY] = 1
    turns = example.messages or [m for answer, _ in example.answers if isinstance(answer, list) for m in answer]
    if untrained := sum(map(is_untrained, turns)):
        example.notes[UNTRAINED] = untrained
    example.columns = {k: v for k, v in row.items() if k not in form.asks}
    if example.images:
        example.columns = {k: bare(v) for k, v in text.items() if k in example.columns}
    return example


def _place_images(example: Example, column: list, is_raw: bool) -> None:
    """Give each image of the messages its source; a prompt of text becomes a user's turn. column: the sources of the
    row's column."""
    if any(sources_in(answer) for answer, _ in example.answers if isinstance(answer, list)):
        raise SkipRow(SAID)
    if column and isinstance(example.prompt, str) and not (is_raw or example.is_text_pair):
        example.prompt = [user(example.prompt)]
        example.answers = [(a.removeprefix(" ") if isinstance(a, str) else a, score) for a, score in example.answers]
    messages = example.messages or example.prompt
    if not isinstance(messages, list):
        if column:
            raise SkipRow(NO_TURN)
        return
    if column or sources_in(messages):
        messages = placed(messages, column)
        example.images = sources_in(messages)
        example.prompt = example.prompt and messages[: len(example.prompt)]
        example.messages = example.messages and messages


def read_rows(rows: Iterable[dict], form: Format, where: str, lost: Callable[[str, int], None], is_raw: bool = False
              ) -> Iterator[Example]:
    """`read_row` of each row; lost is called with the reason and the number of each row that is dropped."""
    for number, row in enumerate(rows, 1):
        try:
            example = read_row(row, form, f"{where} row {number}", is_raw)
        except SkipRow as reason:
            lost(str(reason), number)
        else:
            example.row = number
            yield example


def _as_text(row: dict, example: Example) -> str | None:
    """The question as text, if its columns are text and it is one user turn without tools: reward functions get it like
    a plain-text prompt."""
    if not isinstance(example.prompt, list) or len(example.prompt) != 1 or example.tools:
        return None
    text = example.prompt[0]["content"]
    is_text = all(isinstance(row[name], str) and clean(row[name]) in text for name in example.used)
    return text if example.used and is_text and example.prompt[0]["role"] == "user" else None


def _unread(row: dict, example: Example, known: set[str]) -> tuple[str, ...]:
    """Columns with text, except those in `known` and those whose text is part of the example."""
    names = [name for name, value in row.items() if name not in known and _has_text(value)]
    parts = (example.text, example.prompt, example.messages, *(answer for answer, _ in example.answers))
    text = "\n".join(map(flat, parts))
    return tuple(name for name in names if not isinstance(row[name], str) or row[name].strip() not in text)


def _has_text(value: object) -> bool:
    if isinstance(value, dict | list):
        return any(map(_has_text, islice(value.values() if isinstance(value, dict) else value, 100)))
    return isinstance(value, str) and bool(value.strip())


def _text(value: object, column: str) -> Text:
    """An answer: a string, or messages, possibly as JSON text."""
    if isinstance(value, str):
        return parsed_messages(value, column, is_answer=True) or clean(value)
    if isinstance(value, dict):
        return messages_of([value], column)
    if isinstance(value, list):
        return messages_of(value, column)
    raise TypeError(f"{column} must be a string or a list of messages, not {type(value).__name__}")


def _number(value: object, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{column} must be a number, not {value!r:.40}")
    return number


def _sequence(value: object, column: str) -> list:
    """A list, possibly as JSON text (csv)."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            raise ValueError(f"{column} must be a list, not {value!r:.40}") from None
    if not isinstance(value, list):
        raise TypeError(f"{column} must be a list, not {type(value).__name__}")
    return value


def _truth(value: object, column: str) -> bool:
    known = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False,
             "-1": False}
    key = str(value).strip().lower()
    if key not in known:
        raise ValueError(f"{column} must be true or false, not {value!r:.40}")
    return known[key]


def _example(row: dict, asked: Question, texts: list[Text], scores: Sequence[float], margin: float = 0.0) -> Example:
    """An Example with the question and its answers in matching form, without a repeated question."""
    if len(texts) == 2 and texts[0] == texts[1] and scores[0] != scores[1]:
        raise SkipRow("the two answers are the same")
    written = row["prompt"] if "prompt" in asked.used else None
    turns = [user(asked.text)] if isinstance(asked.text, str) else asked.text or []
    notes = {}
    if turns and all(isinstance(t, list) and t[: len(turns)] == turns and len(t) > len(turns) for t in texts):
        texts, notes = [text[len(turns) :] for text in texts], {REPEATED: 1}
    rests = _without_question(written, turns, texts)
    if isinstance(asked.text, list) and not isinstance(written, list):
        texts, rests = ([text if not isinstance(text, str) else text.strip() if is_transcript(written) else
                         text.removeprefix(" ") if written else [assistant(text)] for text in part]
                        for part in (texts, [text.lstrip() for text in rests]))
    answers, shorter = (list(zip(part, scores, strict=True)) if part else [] for part in (texts, rests))
    return Example(asked.text, answers, shorter, margin=margin, used=asked.used, notes=notes)


def _without_question(written: object, turns: list[dict], texts: list[Text]) -> list[str]:
    """Answers that are strings, without the question that each begins with, cut between words; [] if one does not."""
    text = written if isinstance(written, str) else turns[-1]["content"] if turns else ""
    for start in dict.fromkeys((text, text.rstrip(), text.strip())) if len(texts) > 1 else ():
        rests = [t[len(start) :] if isinstance(t, str) and t.startswith(start) else "" for t in texts]
        if start.strip() and all(r.strip() and (r[0].isspace() or not start[-1].isalnum()) for r in rests):
            return rests
    return []


def _read_pair(row: dict, *columns: str) -> Example:
    *asks, better, worse = columns
    texts = [_text(row[c], c) for c in (better, worse)]
    margin = _number(row["margin"], "margin") if row.get("margin") is not None else 0.0
    asked = _last_question(row, asks[0]) if asks and asks[0] in CONVERSATIONS else question_of(row, asks or ("prompt",))
    if asked.text is None:
        are_turns = [isinstance(text, list) or is_transcript(text) for text in texts]
        if not any(are_turns):
            prompt, *rests = common_text(*texts)
            return Example(prompt, list(zip(rests, (1.0, 0.0), strict=True)), margin=margin, is_text_pair=True)
        if not all(are_turns):
            raise SkipRow("one answer is a transcript, the other is not")
        texts = [parse_transcript(text) if isinstance(text, str) else text for text in texts]
        if texts[0] == texts[1]:
            raise SkipRow("the two answers are the same")
    are_whole = [isinstance(text, list) and text[0]["role"] != "assistant" for text in texts]
    if asked.text is None or all(are_whole):  # both contain the question
        shared, *texts = common_prompt(*texts)
        prompt = _messages_between(row["prompt"], shared) if asks == ["prompt"] else []
        is_more = isinstance(asked.text, list) and asked.text[-len(shared) :] == shared  # such as a system message
        asked = beside(prompt, row, asks) if prompt else asked if is_more else beside(shared, row)
    elif any(are_whole):
        raise SkipRow("one answer begins with the prompt, the other does not")
    return _example(row, asked, texts, (1.0, 0.0), margin)


def _messages_between(prompt: object, shared: list[dict]) -> list[dict]:
    """The messages of a prompt and of two conversations' common prefix, without repetition; [] for a prompt of text."""
    turns = messages_of(prompt, "prompt") if isinstance(prompt, list) else parsed_messages(str(prompt), "prompt") or []
    if all(turn in shared or turn["role"] == shared[0]["role"] == "system" for turn in turns):
        return shared if turns else []
    same = next(n for n in range(min(len(turns), len(shared)), -1, -1) if turns[len(turns) - n :] == shared[:n])
    return [*turns, *shared[same:]]


def _last_question(row: dict, column: str) -> Question:
    """A conversation up to its last question; an answer after it is a copy of the better one."""
    messages = messages_of(_sequence(row[column], column), column)
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    return beside(messages, row, (column,))


def _read_ranked(row: dict, ask: str, column: str, marks: str) -> Example:
    texts = [_text(c, column) for c in _sequence(row[column], column)]
    scores = [_number(s, marks) for s in _sequence(row[marks], marks)]
    if len(texts) != len(scores):
        raise ValueError(f"{len(texts)} {column} but {len(scores)} {marks}")
    if not texts:
        raise SkipRow(f"no {column}")
    return _example(row, question_of(row, (ask,)), texts, scores)


def _read_graded(text: str, score: str, sign: float, row: dict, ask: str, column: str) -> Example:
    """Answers as objects with the keys `text` and `score`; sign: -1 for ranks, where lower is better."""
    items = [item if isinstance(item, dict) else {} for item in _sequence(row[column], column)]
    if not items:
        raise SkipRow(f"no {column}")
    return _example(row, question_of(row, (ask,)), [_text(item.get(text), column) for item in items],
                    [sign * _number(item.get(score), f"{score} in {column}") for item in items])


def _read_choice(values: tuple[float, float], row: dict, ask: str, first: str, second: str, choice: str) -> Example:
    """Two answers and a choice between them. values: of the column `choice` for the first and the second answer."""
    number = _number(row[choice], choice)
    number = math.copysign(1, number) if number and values == BY_SIGN else number
    if number not in values:
        if values == BY_SIGN:
            raise SkipRow("the two answers are rated the same")
        raise ValueError(f"{choice} must be {values[0]} or {values[1]} (the better answer), not {row[choice]!r:.40}")
    texts = [_text(row[c], c) for c in (first, second)]
    return _example(row, question_of(row, (ask,)), texts if number == values[0] else texts[::-1], (1.0, 0.0))


def _read_answer(row: dict, ask: str, answer: str, label: str | None = None) -> Example:
    score = 1.0 if label is None else float(_truth(row[label], label))
    text = _first_answer(row[answer], answer) if answer in ANSWERS else row[answer]
    texts = [] if text is None else [_text(text, answer)]
    return _example(row, question_of(row, (ask, "input") if ask == "instruction" else (ask,)), texts,
                    [score] * len(texts))


def _first_answer(value: object, column: str) -> object:
    """The first of several answers: a string, a list of them, SQuAD's {"text": [...], "answer_start": [...]}, or a list
    of {"text"}; None without any. Anything else, such as messages, is unchanged."""
    if column == "answers" and isinstance(value, str) and value.lstrip().startswith("["):  # from a csv
        value = _sequence(value, column)
    if isinstance(value, list) and not (value and isinstance(value[0], dict) and "text" not in value[0]):
        value = value[0] if value else None
    return _first_answer(value["text"], column) if isinstance(value, dict) and "text" in value else value


def _read_conversation(row: dict, column: str) -> Example:
    messages, used = beside(messages_of(_sequence(row[column], column), column), row, (column,))
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
    return Example(messages[:last] or None, messages=messages, used=used)


def _read_text(row: dict, column: str) -> Example:
    if not isinstance(row[column], str):
        raise TypeError(f"{column} must be a string, not {type(row[column]).__name__}")
    return Example(text=clean(row[column]))


def _read_prompt(row: dict, column: str) -> Example:
    asked = question_of(row, (column,))
    return Example(asked.text, used=asked.used)


# In order: the most specific columns first.
TABLE: tuple[Format, ...] = (
    Format("paired answers", ("question", "response_j", "response_k"), "preference", _read_pair),
    Format("judged outputs", ("input", "output_1", "output_2", "label"), "preference",
           partial(_read_choice, (1, 2))),
    Format("HelpSteer", ("prompt|context", "response_1|response1", "response_2|response2",
                         "preference_strength|overall_preference"), "preference", partial(_read_choice, BY_SIGN)),
    Format("SHP", ("history", "human_ref_A", "human_ref_B", "labels"), "preference",
           partial(_read_choice, (1, 0))),
    Format("ranked", ("prompt|instruction|question|input", "completions|generations", "scores|ratings"), "preference",
           _read_ranked),
    Format("preference", ("prompt|instruction|question|query|problem|input|conversations|messages",
                          "chosen|chosen_response", "rejected|rejected_response"), "preference", _read_pair),
    Format("preference with implicit prompt", ("chosen|chosen_response", "rejected|rejected_response"), "preference",
           _read_pair),
    Format("UltraFeedback", ("instruction", "completions"), "preference",
           partial(_read_graded, "response", "fine-grained_score", 1)),
    Format("Nectar", ("prompt", "answers"), "preference", partial(_read_graded, "answer", "rank", -1)),
    Format("unpaired", ("prompt|instruction|question|input", "completion", "label"), "unpaired", _read_answer),
    Format("unpaired response", ("prompt", "response", "label"), "unpaired", _read_answer),
    Format("prompt-completion", ("prompt", "completion"), "demonstration", _read_answer),
    Format("prompt-response", ("prompt", "response"), "demonstration", _read_answer),
    Format("Alpaca", ("instruction", "output"), "demonstration", _read_answer),
    Format("GPTeacher", ("instruction", "response|completion|generation"), "demonstration", _read_answer),
    Format("messages", ("messages",), "conversation", _read_conversation),
    Format("ShareGPT", ("conversations|conversation",), "conversation", _read_conversation),
    Format("prompt only", ("prompt",), "prompt", _read_prompt),
    Format("question-answer", ("question", "answer"), "demonstration", _read_answer),
    Format("question-answers", ("question", "answers"), "demonstration", _read_answer),
    Format("question-response", ("question|query|problem|input", "response|solution|output|completion|answer"),
           "demonstration", _read_answer),
    Format("language modelling", ("text",), "text", _read_text),
    Format("question only", ("question|problem|instruction",), "prompt", _read_prompt),
)
FORMATS = tuple(row._replace(required=names) for row in TABLE
                for names in product(*(column.split("|") for column in row.required)))
