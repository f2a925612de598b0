"""The last turn of a rendered prompt, which is what a reader looks for in samples and reports."""

from __future__ import annotations

import re

# Markers of published chat templates, and the speakers of transcripts: <|im_end|>, </s>, <start_of_turn>, [/INST].
_MARKER = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|"
                     r"\n\n(?=(?:Human|Assistant): ?)")
_ROLE = re.compile(r"\s*(user|human|assistant|model|system|tool)\b:?[ \n]*", re.IGNORECASE)


def last_turn(prompt: str) -> str:
    """The text of the last turn that says something, without markers and role; a prompt of no turns as it is."""
    for part in reversed(_MARKER.split(prompt)):
        role = _ROLE.match(part)
        if text := part[role.end() if role else 0:].strip():
            return text if _MARKER.search(prompt) else prompt
    return prompt
