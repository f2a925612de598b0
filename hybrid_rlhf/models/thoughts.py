"""How models write a thought before what they say: the markers of the families, and what a message holds of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# before and behind a thought, as each family writes them
MARKERS = (("<think>\n", "\n</think>\n\n"), ("[THINK]", "[/THINK]"), ("<|channel>thought\n", "\n<channel|>"),
           ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
           (" to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>"),
           ("<|START_THINKING|>", "<|END_THINKING|>"), ("<seed:think>", "</seed:think>"))
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_WORD = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")  # a marker by itself, which means nothing else (<|channel> does)


def words_of(pairs: Iterable[tuple[str, str]] = MARKERS) -> set[str]:
    """The markers that are words of their own, of pairs of which both are."""
    stripped = ((opening.strip(), closing.strip()) for opening, closing in pairs)
    return {word for pair in stripped if all(map(_WORD.fullmatch, pair)) for word in pair}


def markers_of(content: str) -> tuple[str, str] | None:
    """The markers, without white space, of the thought that `content` begins with, and that it ends."""
    text = content.lstrip()
    pairs = ((opening.strip(), closing.strip()) for opening, closing in MARKERS)
    return next((pair for pair in pairs if text.startswith(pair[0]) and pair[1] in text), None)


def thought_of(message: Mapping) -> tuple[str, str]:
    """(what an assistant thinks, what it says), by a field of its own or by the markers around the beginning of its
    content, whatever family they are of."""
    content = message.get("content") or ""
    apart = next((message[name] for name in THOUGHT_FIELDS if isinstance(message.get(name), str)), "")
    markers = markers_of(content)
    if apart or markers is None:
        return apart.strip(), content
    thought, _, said = content.lstrip().removeprefix(markers[0]).partition(markers[1])
    return thought.strip(), said


def markers_in(template: str) -> tuple[str, str] | None:
    """The markers of a family that a chat template's own text names, to remove thoughts by, say."""
    named = ((pair, [part.strip() for part in pair]) for pair in MARKERS)
    return next((pair for pair, (opening, closing) in named
                 if closing in template and (opening in template or opening.partition(">")[0] + ">" in template)), None)
