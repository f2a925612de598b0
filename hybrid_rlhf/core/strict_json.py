"""JSON that every reader takes: no NaN, no Infinity."""

from __future__ import annotations

import dataclasses
import json
import math


def to_json(value: object, **options: object) -> str:
    """Strict JSON; a number that is not finite, which JSON has no word for, becomes null."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, **options)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain(config: object) -> dict:
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
