"""Prompts for a judge: a template filled with the rubric and the responses, which are marked as material."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.given_paths import expanded
from hybrid_rlhf.data.chat import Text
from hybrid_rlhf.rewards.judge.rubric import Item, Rubric
from hybrid_rlhf.rewards.judge.verdicts import without_thoughts
from hybrid_rlhf.rollout.episode_record import readable

if TYPE_CHECKING:
    from jinja2 import Template

Chat = list[dict[str, str]]
FOLDER = Path(__file__).parent / "templates"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PARTS = ("[system]", "[user]")


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


def open_prompter(kind: str, rubric: Rubric, template: str | None, is_probability: bool) -> Prompter:
    """The prompter of the file `template`, or of the default template of `kind`. UserError for an unusable one."""
    path = Path(expanded(template)) if template else FOLDER / f"{kind}.jinja"
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


def correction(chat: Chat, reply: str, what: str) -> Chat:
    """The chat that asks again, after a reply that could not be read for the reason `what`. It omits the judge's
    thoughts, as chat templates do in earlier turns."""
    again = (f"Your reply cannot be read: {what}. Answer once more, and end with the one JSON object that was asked "
             "for, with nothing behind it.")
    answer = without_thoughts(reply).strip() or "(nothing)"
    return [*chat, {"role": "assistant", "content": answer}, {"role": "user", "content": again}]


