"""Settings as JSON has them: dotted option -> value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hybrid_rlhf.data.source import Source


def plain_settings(config: object) -> dict[str, object]:
    """Every option of nested settings, in their order."""
    return dict(_leaves(config, ""))


def _leaves(config: object, prefix: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass of settings
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", plain(value)


def plain(value: object) -> object:
    """A value as JSON has it: a source that is no more than a path is that text, and so is what is no finite number."""
    if isinstance(value, Source):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        kept = {k: v for k, v in given.items() if k == "path" or (v and (k, v) != ("split", "train"))}
        return value.path if list(kept) == ["path"] else kept
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
