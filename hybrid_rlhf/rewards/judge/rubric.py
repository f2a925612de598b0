"""The rubric of a judge: weighted items, each yes or no or from 0 to 10, from YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.given_paths import expanded

YES_NO, SCALE = "yes_no", "0-10"
KINDS = (YES_NO, SCALE)
DEFAULT = Path(__file__).parent / "templates" / "default_rubric.yaml"
MAX_ITEMS = 32
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")  # a key of the reply and part of a metric's name
_TAKEN = ("reason", "better")  # keys of replies beside items


@dataclass(frozen=True)
class Item:
    """One criterion. kind: yes_no (yes is 1, no is 0) or 0-10 (a tenth each). weight: its share of the score."""

    name: str
    question: str
    kind: str = YES_NO
    weight: float = 1.0


@dataclass(frozen=True)
class Rubric:
    """Items, and further instructions about the task."""

    items: tuple[Item, ...]
    instructions: str = ""

    def score(self, values: Mapping[str, float]) -> float:
        """The weighted mean of the items' values, each in [0, 1]."""
        total = sum(item.weight for item in self.items)
        return sum(item.weight * values[item.name] for item in self.items) / total


def read_rubric(source: Mapping | str | None) -> Rubric:
    """The rubric in a mapping or a YAML file; None: the general one. UserError, in one line, for one without items, or
    whose weights sum to 0."""
    if isinstance(source, Mapping):
        return _rubric(source, "reward.judge.rubric")
    path = Path(expanded(source)) if source else DEFAULT
    where = f"reward.judge.rubric {path}" if source else "the general rubric"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{where} does not exist; give a YAML file with items, or the items themselves") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} cannot be read ({error}); give another file") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where} is not valid YAML ({_fault(error)}); fix it (a text with ? or : in it needs "
                        "quotes)") from error
    check(isinstance(content, Mapping), f"{where}: a mapping with items is needed, found {type(content).__name__}")
    return _rubric(content, where)


def _fault(error: Exception) -> str:
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {problem}" if problem and mark else " ".join(str(error).split())[:100]


def _rubric(content: Mapping[Any, Any], where: str) -> Rubric:
    for key in content:
        check(key in ("items", "instructions"), f"{where}: there is no {key}{nearest(str(key), ['items'])}; a rubric "
                                                "has items and instructions")
    rows, text = content.get("items"), content.get("instructions") or ""
    check(isinstance(text, str), f"{where}: instructions is {type(text).__name__}; it must be text")
    check(isinstance(rows, list) and 1 <= len(rows) <= MAX_ITEMS,
          f"{where}: items must be a list of 1 to {MAX_ITEMS}, such as {{name: correct, question: Is it correct?}}")
    items = tuple(_item(row, f"{where}: item {number}") for number, row in enumerate(rows or (), 1))
    names = [item.name for item in items]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    check(twice is None, f"{where}: two items are called {twice}; rename one")
    check(sum(item.weight for item in items) > 0, f"{where}: the weights of its items sum to nothing, so no answer "
                                                  "could score; give one of them a positive weight")
    return Rubric(items, text.strip())


def _item(row: Any, where: str) -> Item:
    check(isinstance(row, Mapping), f"{where} is {row!r:.60}; it must have name and question")
    for key in row:
        known = ("name", "question", "kind", "weight")
        check(key in known, f"{where}: there is no {key}{nearest(str(key), known)}; there are {', '.join(known)}")
    name, question, kind, weight = (row.get("name"), row.get("question"), row.get("kind", YES_NO),
                                    row.get("weight", 1.0))
    check(isinstance(name, str) and _NAME.fullmatch(name) and name not in _TAKEN,
          f"{where}: name is {name!r:.60}; it must be one word of letters, digits and _, and not {' or '.join(_TAKEN)}")
    check(isinstance(question, str) and question.strip(), f"{where}: question is {question!r:.60}; it must be text")
    check(kind in KINDS, f"{where}: kind is {kind!r:.60}; choose {' or '.join(KINDS)}")
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    check(is_number and 0 <= weight < math.inf, f"{where}: weight is {weight!r:.60}; it must be 0 or positive (ask "
                                                "the question so that yes, or 10, is good)")
    return Item(name, " ".join(question.split()), kind, float(weight))
