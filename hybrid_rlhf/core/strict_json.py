"""JSON that every reader takes (no NaN, no Infinity), and JSON of strangers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from hybrid_rlhf.core.options import Settings

MAX_DEPTH = 100  # levels of lists and objects


def to_json(value: object, **options: Any) -> str:
    """Strict JSON; a number that is not finite, which JSON has no word for, becomes null. Lone surrogates, which UTF-8
    has no bytes for, are escaped: \\ud800."""
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, **options)
    return text.encode("utf-8", "backslashreplace").decode()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(config: Settings) -> dict:
    """Settings as JSON reads them back, so that those of a record and those of a command line compare; without the
    options that `config.unused` names, which the stage never reads."""
    found = json.loads(to_json(dataclasses.asdict(config), default=str))
    for option in getattr(config, "unused", ()):
        *sections, name = option.split(".")
        inner = found
        for section in sections:
            inner = inner.get(section, {})
        inner.pop(name, None)
    return found


def loads(text: str) -> object:
    """JSON of at most MAX_DEPTH levels, so that whoever walks through it later gets through.

    Raises JSONDecodeError, RecursionError for more levels, and ValueError for an integer of thousands of digits.
    """
    value = json.loads(text)
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return value
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        level = [inner for outer in level if isinstance(outer, (dict, list))
                 for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return value


def why(error: Exception) -> str:
    """Why `loads` refused a text, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number too long"
