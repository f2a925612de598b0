"""The answers of tools as text for a model."""

from __future__ import annotations

import json

from hybrid_rlhf.core.function_worker import as_json_value
from hybrid_rlhf.core.text_safety import escape_control
from hybrid_rlhf.data.messages import clean


def shown(value: object, max_chars: int) -> str:
    """`value` as the content of a message: text as it is, texts of content blocks joined, else JSON, else str(value).

    Bytes are only said. Control characters and lone surrogates are replaced by visible ones. At most `max_chars`
    characters, and then a line that says where it was cut.
    """
    text = _within_bounds(value, max_chars)
    safe = escape_control(clean(text[:max_chars + 1].replace("\r\n", "\n")))
    if len(text) <= max_chars and len(safe) <= max_chars:
        return safe
    return f"{safe[:max_chars]}\n[cut here: only the first {max_chars} characters of the answer are shown]"


def _within_bounds(value: object, max_chars: int) -> str:
    """The text, complete or at least max_chars + 1 characters of it."""
    if isinstance(value, str):
        return str.__str__(value)
    try:
        if isinstance(value, list) and value and all(map(_is_block, value)):
            return "".join(map(_text_of_block, value))
        plain = value if isinstance(value, (list, tuple, dict)) else as_json_value(value)
        return plain if isinstance(plain, str) else _json(plain, max_chars)
    except Exception as error:  # of a user's class
        return f"(a {type(value).__name__}, which cannot be shown: {type(error).__name__})"


def _is_block(part: object) -> bool:
    """Whether it is a part of a message's content, as in {"type": "text", "text": "..."}."""
    if not isinstance(part, dict):
        return False
    return part.get("type") == "image" or (part.get("type") == "text" and isinstance(part.get("text"), str))


def _text_of_block(part: dict) -> str:
    return part["text"] if part["type"] == "text" else "(an image, which is not shown)"


def _json(value: object, max_chars: int) -> str:
    """JSON that ends soon after max_chars characters: the rest of a large table is not written."""
    pieces, length = [], 0
    for piece in json.JSONEncoder(ensure_ascii=False, default=as_json_value).iterencode(value):
        pieces.append(piece)
        length += len(piece)
        if length > max_chars:
            break
    return "".join(pieces)
