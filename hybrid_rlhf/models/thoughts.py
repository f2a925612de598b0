"""Thoughts (reasoning) before an answer: the markers of model families, and thoughts in messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# the texts before and after a thought, of each family
MARKERS = (("<think>\n", "\n</think>\n\n"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "\n<channel|>"),
           ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
           (" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
           ("<|START_THINKING|>", "<|END_THINKING|>"), ("<seed:think>", "</seed:think>"))
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_WORD = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")  # a marker of one meaning (<|channel> has others)


def words_of(pairs: Iterable[tuple[str, str]] = MARKERS) -> set[str]:
    """The markers that are single tags, from pairs in which both are."""
    stripped = ((opening.strip(), closing.strip()) for opening, closing in pairs)
    return {word for pair in stripped if all(map(_WORD.fullmatch, pair)) for word in pair}


def markers_of(content: str) -> tuple[str, str] | None:
    """The markers, without white space, of a complete thought that `content` begins with, or None."""
    text = content.lstrip()
    pairs = ((opening.strip(), closing.strip()) for opening, closing in MARKERS)
    return next((pair for pair in pairs if text.startswith(pair[0]) and pair[1] in text), None)


def thought_of(message: Mapping) -> tuple[str, str]:
    """(thought, answer) of an assistant's message: from a field of thoughts, or from the markers of any family around
    the beginning of its content."""
    content = message.get("content") or ""
    separate = next((message[name] for name in THOUGHT_FIELDS if isinstance(message.get(name), str)), "")
    markers = markers_of(content)
    if separate or markers is None:
        return separate.strip(), content
    thought, _, answer = content.lstrip().removeprefix(markers[0]).partition(markers[1])
    return thought.strip(), answer


def markers_in(template: str) -> tuple[str, str] | None:
    """The markers of a family in the text of a chat template, with which it may remove thoughts."""
    named = ((pair, [part.strip() for part in pair]) for pair in MARKERS)
    return next((pair for pair, (opening, closing) in named
                 if closing in template and (opening in template or opening.partition(">")[0] + ">" in template)), None)
