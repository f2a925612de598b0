"""What a judge is asked: a rubric of weighted items from YAML, and prompts, which are a template filled with the rubric
and the responses."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hybrid_rlhf.core.config import UserError, check, nearest
from hybrid_rlhf.core.given_paths import expanded
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.rewards.judge.judge_config import ABSOLUTE, PROBABILITY, JudgeConfig
from hybrid_rlhf.rollout.episode_record import readable

if TYPE_CHECKING:
    from jinja2 import Template

Chat = list[dict[str, str]]
FOLDER = Path(__file__).parent / "templates"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PARTS = ("[system]", "[user]")
YES_NO, SCALE = "yes_no", "0-10"
KINDS = (YES_NO, SCALE)
MAX_ITEMS = 32
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")  # a key of the reply and part of a metric's name
_TAKEN = ("reason", "better")  # keys of replies beside items


# -- the rubric --------------------------------------------------------------------------------------------------------


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
    path = Path(expanded(source)) if source else FOLDER / "default_rubric.yaml"
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


# -- the prompt --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompter:
    """Renders chats for the judge from `template`: a jinja template of each part, behind the lines [system] and [user].
    Its variables: instructions, items (name, question, kind, weight), prompt, responses (letter, text), tag,
    is_probability."""

    rubric: Rubric
    template: str
    source: str
    is_probability: bool = False

    def chat(self, prompt: Text, responses: Sequence[Text], items: Sequence[Item] | None = None) -> Chat:
        """The question about `responses` to `prompt`, by the items of the rubric or by some of them."""
        texts = [shown(each) for each in (prompt, *responses)]
        named = [{"letter": LETTERS[i], "text": text} for i, text in enumerate(texts[1:])]
        values = {"instructions": self.rubric.instructions, "items": list(items or self.rubric.items),
                  "prompt": texts[0], "responses": named, "tag": tag_for(texts), "is_probability": self.is_probability}
        return [{"role": part[1:-1], "content": self._rendered(text, values)} for part, text in self._parts()]

    def check(self) -> None:
        """UserError for a template that cannot be rendered, or that does not show prompt and response."""
        marks = ["a placeholder response", "another placeholder"]
        text = "\n".join(part["content"] for part in self.chat("a question", marks))
        check(marks[0] in text, f"{self.source} shows no response; it must hold {{{{ responses[0].text }}}}, or a loop")
        check("a question" in text, f"{self.source} shows no prompt; it must hold {{{{ prompt }}}}")

    def _parts(self) -> list[tuple[str, str]]:
        """The template's parts, split before it is filled: [user] in a response does not start a part."""
        parts: list[tuple[str, list[str]]] = []
        for line in self.template.splitlines(keepends=True):
            if line.strip() in _PARTS:
                parts.append((line.strip(), []))
            elif parts:
                parts[-1][1].append(line)
            else:
                check(not line.strip(), f"{self.source} begins with {line.strip()[:40]!r}; it must begin with the line "
                                        "[system] or [user]")
        check([name for name, _ in parts] in (list(_PARTS), ["[user]"]),
              f"{self.source} has the parts {' '.join(name for name, _ in parts) or 'none'}; it must have [user], and "
              "may have [system] before it")
        return [(name, "".join(lines)) for name, lines in parts]

    def _rendered(self, text: str, values: dict[str, Any]) -> str:
        from jinja2 import TemplateError

        try:
            return _compiled(text).render(values).strip()
        except (TemplateError, TypeError, ArithmeticError) as error:
            raise UserError(f"{self.source}: {' '.join(str(error).split())[:200]}; fix the template") from error


@lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    """A compiled template, cached: compiling takes many times as long as rendering."""
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
                                         ).from_string(text)


def open_prompts(config: JudgeConfig) -> Prompter:
    """The rubric and the template of the settings. UserError for an unusable one."""
    rubric, is_probability = read_rubric(config.rubric), config.score == PROBABILITY
    kind = PROBABILITY if config.mode == ABSOLUTE and is_probability else config.mode
    path = Path(expanded(config.template)) if config.template else FOLDER / f"{kind}.jinja"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.template {path} cannot be read ({type(error).__name__}); give a file such as "
                        f"{FOLDER / 'absolute.jinja'}") from error
    prompter = Prompter(rubric, text, f"reward.judge.template {path}", is_probability)
    prompter.check()
    return prompter


def shown(text: Text) -> str:
    """A prompt or a response for the judge: text as it is, messages turn by turn with tool calls.

    Further lines of a turn are indented, so that a policy cannot fake a tool result.
    """
    if isinstance(text, str):
        return text
    if [m["role"] for m in text] == ["assistant"] and not text[0].get("tool_calls"):
        return text[0]["content"]
    return "\n".join("\n    ".join(readable([message]).splitlines()) for message in text)


def tag_for(texts: Sequence[str]) -> str:
    """A word that none of the texts contains, derived from their hash: their authors cannot have written it, and equal
    questions have equal tags."""
    start = hashlib.sha256("\0".join(texts).encode("utf-8", "backslashreplace"))
    for number in range(2**16):
        mixed = start.copy()
        mixed.update(str(number).encode())
        tag = f"text-{mixed.hexdigest()[:8]}"
        if not any(tag in text for text in texts):
            return tag
    raise RuntimeError("no word is free")  # of 2^16 random ones
