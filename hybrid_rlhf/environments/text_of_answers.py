"""The answers of tools as text for a model."""

from __future__ import annotations

from hybrid_rlhf.core.function_worker import text_of
from hybrid_rlhf.core.text_safety import escape_control
from hybrid_rlhf.data.messages import clean


def shown(value: object, max_chars: int) -> str:
    """`value` as the content of a message: text as it is, texts of content blocks joined, else JSON, else str(value).

    Bytes are only mentioned. Control characters and lone surrogates are replaced by visible ones. At most `max_chars`
    characters, and then a line that says where it was cut.
    """
    text = text_of(value, max_chars)
    safe = escape_control(clean(text.replace("\r\n", "\n")))
    if len(text) <= max_chars and len(safe) <= max_chars:
        return safe
    return f"{safe[:max_chars]}\n[cut here: only the first {max_chars} characters of the answer are shown]"
