"""Compare several models' answers to the same prompts: means and intervals, evaluate.json, evaluate.md, a table.

Scores are paired: every model answers every prompt. The interval of a mean score and of a difference of means is the
percentile bootstrap over prompts (paired: a resample takes the same prompts from both models); that of a win rate is
Wilson's (1927) over prompts, a tie counting as half a win. With several answers per prompt a prompt is still one
observation, as its answers are not independent.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.report.summary import cell, table

if TYPE_CHECKING:
    from rich.console import Console

Interval = tuple[float, float]


@dataclass
class Answered:
    """One model's answers to P prompts, S to each, in the prompts' order.

    scores (P, S), NaN where every source skipped; parts: (P, S) of each source; completions: P lists of S texts. Flat,
    P * S values each: lengths in tokens, ended (whether with an end token), nats (log-probability minus the
    reference's; None where the reference cannot read the tokens), is_right (None without a checker).
    """

    name: str
    path: str
    scores: np.ndarray
    parts: dict[str, np.ndarray]
    completions: list[list[str]]
    lengths: Sequence[float]
    ended: Sequence[bool]
    nats: Sequence[float] | None = None
    is_right: Sequence[bool] | None = None


@dataclass(frozen=True)
class Method:
    """How intervals are computed: their coverage, the number of bootstrap resamples, and the seed."""

    confidence: float = 0.95
    num_resamples: int = 10_000
    seed: int = 0


class Section(NamedTuple):
    """A further section of the page: its lines of Markdown, and its values in the JSON file."""

    lines: Sequence[str]
    values: dict


@dataclass
class Comparison:
    """rows: the figures of each model; the others are compared with the first."""

    rows: list[dict] = field(default_factory=list)
    method: Method = field(default_factory=Method)


def wilson(wins: float, count: int, confidence: float = 0.95) -> Interval:
    """Interval of a proportion, wins out of count (ties may count as half), after Wilson (1927)."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, scale = wins / count, 1 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    half = z / scale * (share * (1 - share) / count + z * z / (4 * count * count)) ** 0.5
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: np.ndarray, method: Method) -> Interval:
    """Percentile interval of the mean of (P,) values, one for each prompt. The same seed draws the same prompts, so
    that intervals of several models have the same resamples."""
    rng = np.random.default_rng(method.seed)
    means, chunk = [], max(1, 4_000_000 // max(len(values), 1))
    for first in range(0, method.num_resamples, chunk):
        size = min(chunk, method.num_resamples - first)
        means.append(values[rng.integers(len(values), size=(size, len(values)))].mean(1))
    tail = (1 - method.confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def win_rates(scores: np.ndarray, other: np.ndarray) -> np.ndarray:
    """(P,): per prompt, how often an answer scores higher than the other model's answer with the same index; a tie
    counts half, NaN scores are left out."""
    return _means(np.where(np.isnan(scores + other), np.nan, (scores > other) + 0.5 * (scores == other)))


def _means(values: np.ndarray) -> np.ndarray:
    """(P,): mean of each row without NaN; NaN for a row of NaN alone."""
    count = (~np.isnan(values)).sum(1)
    return np.where(count > 0, np.nansum(values, 1) / np.maximum(count, 1), np.nan)


def _known(values: np.ndarray) -> np.ndarray:
    return values[~np.isnan(values)]


def distinct(completions: Sequence[str], n: int) -> float:
    """Distinct-n (1510.03055): distinct n-grams of words over all n-grams, of all completions together."""
    ngrams = [tuple(words[i : i + n]) for words in (re.findall(r"\w+|[^\w\s]", text.lower()) for text in completions)
              for i in range(len(words) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def compare(models: Sequence[Answered], method: Method) -> Comparison:
    """The figures of each model, and of each against the first."""
    return Comparison([_row(model, models[0] if i else None, method) for i, model in enumerate(models)], method)


def _row(model: Answered, first: Answered | None, method: Method) -> dict:
    texts = [text for answers in model.completions for text in answers]
    row = {"model": model.name, "path": model.path, "score": float(np.nanmean(model.scores)),
           "score_interval": bootstrap(_known(_means(model.scores)), method)}
    if model.is_right is not None:
        right = np.asarray(model.is_right, float).reshape(model.scores.shape)
        row |= {"accuracy": float(right.mean()), "accuracy_interval": wilson(right.mean(1).sum(), len(right),
                                                                               method.confidence)}
    if first is not None:
        row |= _against(model, first, method)
    if len(model.parts) > 1:
        row["sources"] = {name: float(np.nanmean(part)) for name, part in model.parts.items() if
                          not np.isnan(part).all()}
    return row | {"kl": fmean(model.nats) if model.nats is not None else None, "length": fmean(model.lengths),
                  "ended": fmean(model.ended), "distinct_1": distinct(texts, 1), "distinct_2": distinct(texts, 2)}


def _against(model: Answered, first: Answered, method: Method) -> dict:
    """Win rate and score gain of this model against the first, on the prompts where both have a score."""
    rates = _known(win_rates(model.scores, first.scores))
    gains = _known(_means(model.scores) - _means(first.scores))
    low, high = wilson(float(rates.sum()), len(rates), method.confidence)
    gained = bootstrap(gains, method)
    return {"win_rate": float(rates.mean()), "win_rate_interval": (low, high),
            "ties": float((model.scores == first.scores)[~np.isnan(model.scores + first.scores)].mean()),
            "score_gain": float(gains.mean()),
            "score_gain_interval": gained, "is_better": low > 0.5, "is_worse": high < 0.5}


def examples(prompts: Sequence[str], models: Sequence[Answered], count: int) -> list[dict]:
    """The first `count` prompts with each model's first answer and its score."""
    return [{"prompt": prompts[p], "answers": {m.name: {"completion": m.completions[p][0],
                                                         "score": None if np.isnan(m.scores[p, 0]) else
                                                         float(m.scores[p, 0])} for m in models}}
            for p in range(min(count, len(prompts)))]


def write(folder: Path, comparison: Comparison, shown: list[dict], facts: dict, more: Section | None = None
          ) -> list[Path]:
    """Write evaluate.json and evaluate.md in `folder`; returns their paths. facts: settings of the evaluation."""
    method = {"confidence": comparison.method.confidence, "win_rate": "Wilson over prompts, a tie is half a win",
              "score": f"percentile bootstrap over prompts, paired, {comparison.method.num_resamples} resamples"}
    contents = {**facts, "intervals": method, "models": comparison.rows, **(more.values if more else {}),
                "examples": shown}
    texts = {folder / "evaluate.json": to_json(contents, indent=1) + "\n",
             folder / "evaluate.md": page(comparison, shown, facts, more)}
    for path, text in texts.items():
        write_file(path, text)
    return list(texts)


COLUMNS = {"score": "score", "accuracy": "accuracy", "win_rate": "win rate", "score_gain": "score gain", "kl": "KL",
           "length": "length", "ended": "ended", "distinct_1": "distinct-1", "distinct_2": "distinct-2"}


def cells(comparison: Comparison) -> list[dict[str, str]]:
    """The table as text: a row for each model, numbers with their intervals."""
    names = [n for n in COLUMNS if any(row.get(n) is not None for row in comparison.rows)]
    decimals = {n: 2 if n in ("score", "score_gain", "kl", "length") else 3 for n in names}
    return [{"model": row["model"], **{COLUMNS[n]: _number(row.get(n), row.get(f"{n}_interval"), decimals[n])
                                       for n in names}} for row in comparison.rows]


def _number(value: float | None, interval: Interval | None, decimals: int) -> str:
    if value is None:
        return ""
    return f"{value:.{decimals}f}" + (f" [{interval[0]:.{decimals}f}, {interval[1]:.{decimals}f}]" if interval else "")


def verdicts(comparison: Comparison) -> list[str]:
    """The win rates in words, a sentence for each model but the first."""
    percent, first = f"{comparison.method.confidence:.0%}", comparison.rows[0]["model"]
    words = {(True, False): "wins more often than it loses", (False, True): "loses more often than it wins"}
    return [f"{row['model']} {words.get((row['is_better'], row['is_worse']), 'is not told apart by who wins')} "
            f"against {first}: {row['win_rate']:.1%} of the prompts "
            f"({percent} interval {row['win_rate_interval'][0]:.1%} to {row['win_rate_interval'][1]:.1%})"
            for row in comparison.rows[1:]]


def page(comparison: Comparison, shown: list[dict], facts: dict, more: Section | None = None) -> str:
    """The comparison as Markdown; the further section `more` comes before the answers."""
    lines = ["# Evaluation", "", *(f"- {name.replace('_', ' ')}: {_plain(value)}" for name, value in facts.items()), ""]
    if comparison.rows:
        lines += [*text_table(cells(comparison)), "", *(f"- {_escaped(line)}" for line in verdicts(comparison)), "",
                  f"Brackets: {comparison.method.confidence:.0%} intervals. Scores: percentile bootstrap over prompts "
                  f"({comparison.method.num_resamples} resamples, paired for gains). Win rate and accuracy: Wilson "
                  "over prompts, a tie is half a win.", ""]
    lines += [*more.lines, ""] if more else []
    lines += ["## Answers side by side", ""] if shown else []
    for each in shown:
        lines += [f"**{_escaped(each['prompt'])}**", "", *table(("model", "score", "answer"), [
            (_escaped(name), _number(a["score"], None, 3), _escaped(a["completion"]))
            for name, a in each["answers"].items()]), ""]
    return "\n".join(lines)


def text_table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Rows of cells as a Markdown table. The first cell of a row is a name, which is escaped."""
    return table(list(rows[0]), [(_escaped(first), *rest) for first, *rest in (row.values() for row in rows)])


def _escaped(text: str) -> str:
    return cell(text.strip(), 1 << 30)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def print_table(title: str | None, rows: Sequence[dict[str, str]]) -> Console:
    """Print rows of cells on stdout, a name and numbers above their intervals; returns the console."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(rows[0]):
        shown.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(text.replace(" [", "\n[")) for text in row.values()))
    console.print(shown)
    return console


def show(comparison: Comparison, shown: list[dict]) -> None:
    """Print the table, the verdicts and a few answers on stdout."""
    from rich.text import Text

    from hybrid_rlhf.report.terminal import one_line

    rows, title = cells(comparison), f"Answers to the same prompts, {comparison.method.confidence:.0%} intervals"
    judged = [n for n in rows[0] if n in ("model", "score", "accuracy", "win rate", "score gain")]
    described = [n for n in rows[0] if n == "model" or n not in judged]
    print_table(title, [{name: row[name] for name in judged} for row in rows])  # two: one is too wide
    console = print_table(None, [{name: row[name] for name in described} for row in rows])
    for line in verdicts(comparison):
        console.print(line, soft_wrap=True)
    for each in shown:
        console.print(Text(one_line(each["prompt"], console.width), style="cyan"))
        for name, answer in each["answers"].items():
            score = _number(answer["score"], None, 2) or "no score"
            console.print(Text(one_line(f"  {name}: {answer['completion']} ({score})", console.width)))
