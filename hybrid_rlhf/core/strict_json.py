"""Strict JSON, which every reader accepts (no NaN, no Infinity), and reading JSON from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from hybrid_rlhf.core.options import Settings


def to_json(value: object, **options: Any) -> str:
    """Strict JSON; a number that is not finite becomes null. Lone surrogates, which UTF-8 cannot encode, are escaped:
    \\ud800."""
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
    values = json.loads(to_json(dataclasses.asdict(config), default=str))
    for option in getattr(config, "unused", ()):
        *sections, name = option.split(".")
        inner = values
        for section in sections:
            inner = inner.get(section, {})
        inner.pop(name, None)
    return values


def loads(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for text that is not JSON, also for one nested more deeply than Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def why(error: ValueError | RecursionError) -> str:
    """Why `loads` refused a text, in words."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg}, column {error.colno}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte 0x{error.object[error.start]:02x} is not UTF-8"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number too long" if "digits" in str(error) else str(error)
