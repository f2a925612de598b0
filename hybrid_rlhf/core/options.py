"""Dotted options of nested settings: frozen dataclasses whose fields are values or settings again."""

from __future__ import annotations

import dataclasses
import typing
from functools import reduce

_WITH_NONE = ("quantize",)  # none: not quantised, whatever the model's own setting; null: as that says


def value_of(config: object, option: str) -> object:
    """The value of a dotted option of nested settings."""
    return reduce(getattr, option.split("."), config)


def with_value(config: object, option: str, value: object) -> object:
    """A copy of nested frozen settings with another value of one dotted option."""
    name, _, inner = option.partition(".")
    return dataclasses.replace(config, **{name: with_value(getattr(config, name), inner, value) if inner else value})


def sections(config_class: type, prefix: str = "") -> set[str]:
    """Dotted names of the options that are dataclasses themselves."""
    own = {f"{prefix}{name}": kind for name, kind in typing.get_type_hints(config_class).items()
           if dataclasses.is_dataclass(kind)}
    return set(own).union(*(sections(kind, f"{name}.") for name, kind in own.items()))


def nulls_in(kind: type, settings: dict) -> dict:
    """Nested settings of the class `kind` with null for none."""
    hints = typing.get_type_hints(kind)
    changed = {}
    for key, value in settings.items():
        if isinstance(value, dict) and dataclasses.is_dataclass(hints.get(key)):
            value = nulls_in(hints[key], value)
        is_none = isinstance(value, str) and value.lower() == "none"
        changed[key] = None if is_none and may_be_null(kind, key) else value
    return changed


def may_be_null(kind: type, option: str) -> bool:
    """Whether null is a value of a dotted option, and none is not one of its own."""
    for name in option.split("."):
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return type(None) in typing.get_args(kind) and option.rpartition(".")[2] not in _WITH_NONE
