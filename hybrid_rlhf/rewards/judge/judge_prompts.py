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

from hybrid_rlhf.core.config import UserError, as_part, check, nearest
from hybrid_rlhf.core.image_files import ImageRef, data_url, file_digest
from hybrid_rlhf.core.options import check_values, expanded, one_of
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.data.row_images import sources_in
from hybrid_rlhf.data.turns import IMAGE, IMAGES
from hybrid_rlhf.data.turns import readable as without_images
from hybrid_rlhf.rewards.judge.judge_config import ABSOLUTE, PROBABILITY, JudgeConfig
from hybrid_rlhf.rollout.episode_record import readable

if TYPE_CHECKING:
    from jinja2 import Template

Chat = list[dict[str, Any]]  # role, content; with images the key IMAGES, as data/row_images.py has it
FOLDER = Path(__file__).parent / "templates"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
YES_NO, SCALE = "yes_no", "0-10"
MAX_ITEMS = 32
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")  # a key of the reply and part of a metric's name
_TAKEN = ("reason", "better")  # keys of replies beside items


# -- the rubric --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One criterion. kind: yes_no (yes is 1, no is 0) or 0-10 (a tenth each). weight: its share of the score."""

    name: str
    question: str
    kind: str = one_of(YES_NO, (YES_NO, SCALE))
    weight: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "question", " ".join(self.question.split()))
        check(_NAME.fullmatch(self.name) and self.name not in _TAKEN, f"name is {self.name!r:.60}; it must be one word "
              f"of letters, digits and _, and not {' or '.join(_TAKEN)}")
        check(self.question, "question is empty; it must be text")
        check_values(self, "")
        check(0 <= self.weight < math.inf, f"weight is {self.weight:g}; it must be 0 or positive (ask the question so "
                                           "that yes, or 10, is good)")


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
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{where} cannot be read ({' '.join(str(error).split())[:200]}); give a YAML file with items "
                        "(a text with ? or : in it needs quotes)") from error
    check(isinstance(content, Mapping), f"{where}: a mapping with items is needed, found {type(content).__name__}")
    return _rubric(content, where)


def _rubric(content: Mapping[Any, Any], where: str) -> Rubric:
    for key in content:
        check(key in ("items", "instructions"), f"{where}: there is no {key}{nearest(str(key), ['items'])}; a rubric "
                                                "has items and instructions")
    rows = content.get("items")
    check(isinstance(rows, list) and 1 <= len(rows) <= MAX_ITEMS,
          f"{where}: items must be a list of 1 to {MAX_ITEMS}, such as {{name: correct, question: Is it correct?}}")
    items = tuple(as_part(Item, row, f"{where}: item {number}") for number, row in enumerate(rows or (), 1))
    names = [item.name for item in items]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    check(twice is None, f"{where}: two items are called {twice}; rename one")
    check(sum(item.weight for item in items) > 0, f"{where}: the weights of its items sum to nothing, so no answer "
                                                  "could score; give one of them a positive weight")
    return Rubric(items, str(content.get("instructions") or "").strip())


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
        """The question about `responses` to `prompt`, by the items of the rubric or by some of them. The images of the
        prompt stand before the text of the user's part, in which each is [image]."""
        texts = [shown(each) for each in (prompt, *responses)]
        named = [{"letter": LETTERS[i], "text": text} for i, text in enumerate(texts[1:])]
        values = {"instructions": self.rubric.instructions, "items": list(items or self.rubric.items),
                  "prompt": texts[0], "responses": named, "tag": tag_for(texts), "is_probability": self.is_probability}
        chat: Chat = [{"role": role, "content": self._rendered(text, values)} for role, text in self._parts()]
        images = [] if isinstance(prompt, str) else [ImageRef(*image) for image in sources_in(prompt)]
        if images:
            text = chat[-1]["content"].replace(IMAGE, "\ufffd")
            chat[-1] |= {"content": IMAGE * len(images) + text, IMAGES: images}
        return chat

    def check(self) -> None:
        """UserError for a template that cannot be rendered, or that does not show prompt and response."""
        marks = ["a placeholder response", "another placeholder"]
        text = "\n".join(part["content"] for part in self.chat("a question", marks))
        check(marks[0] in text, f"{self.source} shows no response; it must hold {{{{ responses[0].text }}}}, or a loop")
        check("a question" in text, f"{self.source} shows no prompt; it must hold {{{{ prompt }}}}")

    def _parts(self) -> list[tuple[str, str]]:
        """The template's parts, split before it is filled: [user] in a response does not start a part."""
        before, *parts = re.split(r"(?m)^[^\S\n]*\[(system|user)\][^\S\n]*$", self.template)
        check(not before.strip(), f"{self.source} begins with {before.strip()[:40]!r}; it must begin with the line "
                                  "[system] or [user]")
        check(parts[::2] in (["system", "user"], ["user"]),
              f"{self.source} has the parts {' '.join(parts[::2]) or 'none'}; it must have [user], and may have "
              "[system] before it")
        return list(zip(parts[::2], parts[1::2], strict=True))

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
    messages = without_images(text)
    if isinstance(messages, str):
        return messages
    if [m["role"] for m in messages] == ["assistant"] and not messages[0].get("tool_calls"):
        return messages[0]["content"]
    return "\n".join("\n    ".join(readable([message]).splitlines()) for message in messages)


def as_parts(chat: Chat) -> Chat:
    """A chat as an OpenAI-compatible address reads it: images as data URLs."""
    return [{"role": message["role"], "content": [
        *({"type": "image_url", "image_url": {"url": data_url(image)}} for image in message[IMAGES]),
        {"type": "text", "text": message["content"].replace(IMAGE, "")}]} if message.get(IMAGES) else message
        for message in chat]


def keyed(chat: Chat) -> Chat:
    """A chat for a key of the cache: with hashes of its images' files, whatever their names are."""
    return [message | {IMAGES: list(map(file_digest, message[IMAGES]))} if message.get(IMAGES) else message
            for message in chat]


def tag_for(texts: Sequence[str]) -> str:
    """A word from the texts' hash, which their authors cannot have written; equal questions have equal tags."""
    content = "\0".join(texts) + "0"
    return f"text-{hashlib.sha256(content.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"
