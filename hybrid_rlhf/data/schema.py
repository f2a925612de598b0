"""The formats people keep their rows in, as one table; every reader gives one of a few canonical kinds of row.

A new format is one reader and one row in FORMATS. `prompt`, `completion`, `chosen` and `rejected` are strings, taken
as they are, or messages: a list of {"role", "content"}. Instruction formats, which were never meant to be run
together, become messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data import transcripts
from hybrid_rlhf.data.chat import SkipRow, Text
from hybrid_rlhf.data.files import loads
from hybrid_rlhf.data.messages import messages_of
from hybrid_rlhf.data.tool_columns import tools_of, with_tools
from hybrid_rlhf.data.transcripts import assistant, clean, user


@dataclass
class Example:
    """One canonical row. Which fields are set depends on its kind (KINDS).

    answers: (completion, score) pairs, of which a higher score is better; only their order counts.
    is_text_pair: the prompt is only the beginning that two plain texts share, and nobody's question.
    written: the prompt as the row has it, where it is rendered in another form.
    tools: the schemas of what may be called, which messages carry already.
    columns: the row's other columns, handed on to reward functions.
    """

    prompt: Text | None = None
    answers: list[tuple[Text, float]] = field(default_factory=list)
    messages: list[dict] | None = None
    text: str | None = None
    margin: float = 0.0
    is_text_pair: bool = False
    written: Text | None = None
    tools: list[dict] = field(default_factory=list)
    columns: dict = field(default_factory=dict)


class Format(NamedTuple):
    """required: columns that tell the format; asks: those the prompt comes from (not handed on with it)."""

    name: str
    required: tuple[str, ...]
    kind: str
    read: Callable[[dict], Example]
    asks: tuple[str, ...] = ("prompt",)


# kind of row -> the trainings it can serve: answers to imitate, pairs to compare, prompts to answer.
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


def detect(columns: Iterable[str], where: str) -> Format:
    """The first format of the table whose required columns are all there.

    Raises UserError that says what was found and what would fit.
    """
    found = [str(c) if str(c).isprintable() else repr(c) for c in columns]
    for row in FORMATS:
        if all(c in found for c in row.required):
            return row
    known = " | ".join("+".join(f.required) for f in FORMATS)
    named = [name[:60] for name in found[:20]] + [f"and {len(found) - 20} more"] * (len(found) > 20)
    raise UserError(f"{where}: columns {', '.join(named) or '(none)'} fit no known format; what would fit: "
                    f"{known}; name yours by columns, such as {{prompt: {named[0] if named else 'question'}}}")


def read_row(row: dict, form: Format, where: str) -> Example:
    """One row in canonical form. Raises SkipRow for a row to drop and count, UserError for one of the wrong type."""
    for column in form.required:
        if column not in row:
            raise UserError(f"{where}: column {column} is missing ({form.name} needs {', '.join(form.required)})")
        if row[column] is None:
            raise SkipRow(f"no {column}")
    try:
        example = form.read(row)
        is_plain = example.text is not None or example.is_text_pair
        example.tools = [] if is_plain else tools_of(row.get("tools"))
        example.prompt, example.messages = (with_tools(part, example.tools)
                                            for part in (example.prompt, example.messages))
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}; fix the row") from error
    example.columns = {k: v for k, v in row.items() if k not in form.asks}
    return example


def _prompt(value: object, column: str = "prompt") -> Text:
    text = _text(value, column)
    return transcripts.parse(text, is_prompt=True) if transcripts.is_transcript(text) else text


def _conversation(value: object, column: str) -> Text:
    text = _text(value, column)
    return transcripts.parse(text) if transcripts.is_transcript(text) else text


def _answer(row: dict, column: str) -> Text:
    """An answer; beside a prompt that is a transcript, without the space that followed "Assistant:"."""
    text = _text(row[column], column)
    return text.strip() if isinstance(text, str) and transcripts.is_transcript(row["prompt"]) else text


def _text(value: object, column: str) -> Text:
    """A string, or messages."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return messages_of([value], column)
    if isinstance(value, list):
        return messages_of(value, column)
    raise TypeError(f"{column} must be a string or a list of messages, not {type(value).__name__}")


def _string(value: object, column: str) -> str:
    if isinstance(value, str):
        return clean(value)
    raise TypeError(f"{column} must be a string, not {type(value).__name__}")


def _number(value: object, column: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{column} must be a number, not {value!r:.40}")
    return number


def _sequence(value: object, column: str) -> list:
    """A list; from a csv, the JSON text of one."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except (ValueError, RecursionError):
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


def _paired(prompt: Text, better: Text, worse: Text, margin: float = 0.0) -> Example:
    if better == worse:
        raise SkipRow("the two answers are the same")
    return Example(prompt, [(better, 1.0), (worse, 0.0)], margin=margin)


def _read_preference(row: dict) -> Example:
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    margin = _number(row["margin"], "margin") if row.get("margin") is not None else 0.0
    if all(isinstance(a, list) and a and a[0]["role"] != "assistant" for a in (chosen, rejected)):
        return _paired(*transcripts.common_prompt(chosen, rejected), margin)  # whole conversations beside the prompt
    return _paired(_prompt(row["prompt"]), chosen, rejected, margin)


def _read_implicit(row: dict) -> Example:
    chosen, rejected = (_conversation(row[c], c) for c in ("chosen", "rejected"))
    margin = _number(row["margin"], "margin") if row.get("margin") is not None else 0.0
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise SkipRow("one answer is a transcript, the other is not")
    if isinstance(chosen, list):
        return _paired(*transcripts.common_prompt(chosen, rejected), margin)
    return replace(_paired(*transcripts.common_text(chosen, rejected), margin), is_text_pair=True)


def _read_ranked(row: dict) -> Example:
    completions = [_text(c, "completions") for c in _sequence(row["completions"], "completions")]
    scores = [_number(s, "scores") for s in _sequence(row["scores"], "scores")]
    if len(completions) != len(scores):
        raise ValueError(f"{len(completions)} completions but {len(scores)} scores")
    if not completions:
        raise SkipRow("no completions")
    return Example(_prompt(row["prompt"]), list(zip(completions, scores, strict=True)))


def _read_paired(row: dict) -> Example:
    return _paired([user(_string(row["question"], "question"))],
                   *([assistant(_string(row[c], c))] for c in ("response_j", "response_k")))


def _read_judged(row: dict) -> Example:
    outputs = [[assistant(_string(row[c], c))] for c in ("output_1", "output_2")]
    best = _number(row["label"], "label")
    if best not in (1, 2):
        raise ValueError(f"label must be 1 or 2 (the better output), not {row['label']!r:.40}")
    return _paired([user(_string(row["input"], "input"))], *(outputs if best == 1 else outputs[::-1]))


def _read_unpaired(answer: str) -> Callable[[dict], Example]:
    def read(row: dict) -> Example:
        label = float(_truth(row["label"], "label"))
        return Example(_prompt(row["prompt"]), [(_answer(row, answer), label)])

    return read


def _read_completion(answer: str) -> Callable[[dict], Example]:
    return lambda row: Example(_prompt(row["prompt"]), [(_answer(row, answer), 1.0)])


def _read_instruction(answer: str) -> Callable[[dict], Example]:
    def read(row: dict) -> Example:
        request = [_string(row["instruction"], "instruction"), _string(row.get("input") or "", "input")]
        return Example([user("\n\n".join(part for part in request if part.strip()))],
                       [([assistant(_string(row[answer], answer))], 1.0)])

    return read


def _read_question(row: dict) -> Example:
    return Example([user(_string(row["question"], "question"))],
                   [([assistant(_string(row["answer"], "answer"))], 1.0)])


def _read_conversation(column: str) -> Callable[[dict], Example]:
    def read(row: dict) -> Example:
        messages = messages_of(_sequence(row[column], column), column)
        system = row.get("system") if column == "conversations" else None
        if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": clean(system)}, *messages]
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
        return Example(messages[:last] or None, messages=messages)

    return read


def _read_text(row: dict) -> Example:
    return Example(text=_string(row["text"], "text"))


def _read_prompt(row: dict) -> Example:
    return Example(_prompt(row["prompt"]))


# In order: the most telling columns first.
FORMATS: tuple[Format, ...] = (
    Format("paired answers", ("question", "response_j", "response_k"), "preference", _read_paired, ("question",)),
    Format("judged outputs", ("input", "output_1", "output_2", "label"), "preference", _read_judged, ("input",)),
    Format("ranked", ("prompt", "completions", "scores"), "preference", _read_ranked),
    Format("preference", ("prompt", "chosen", "rejected"), "preference", _read_preference),
    Format("preference with implicit prompt", ("chosen", "rejected"), "preference", _read_implicit, ()),
    Format("unpaired", ("prompt", "completion", "label"), "unpaired", _read_unpaired("completion")),
    Format("unpaired response", ("prompt", "response", "label"), "unpaired", _read_unpaired("response")),
    Format("prompt-completion", ("prompt", "completion"), "demonstration", _read_completion("completion")),
    Format("prompt-response", ("prompt", "response"), "demonstration", _read_completion("response")),
    Format("Alpaca", ("instruction", "output"), "demonstration", _read_instruction("output"), ("instruction", "input")),
    Format("GPTeacher", ("instruction", "response"), "demonstration", _read_instruction("response"),
           ("instruction", "input")),
    Format("messages", ("messages",), "conversation", _read_conversation("messages"), ("messages",)),
    Format("ShareGPT", ("conversations",), "conversation", _read_conversation("conversations"), ("conversations",)),
    Format("prompt only", ("prompt",), "prompt", _read_prompt),
    Format("question-answer", ("question", "answer"), "demonstration", _read_question, ("question",)),
    Format("language modelling", ("text",), "text", _read_text, ("text",)),
)
