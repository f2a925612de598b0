"""Dotted options of nested settings: frozen dataclasses whose fields are values or settings again."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache, reduce
from typing import Any, ClassVar, Protocol, TypeVar

_WITH_NONE = ("quantize",)  # none: not quantised, whatever the model's own setting; null: as that says
_WORDS = {dict: "a mapping", list: "a list", str: "text", int: "a whole number", float: "a number",
          bool: "true or false", type(None): "null"}


class Settings(Protocol):
    """A dataclass: a section of the settings, or all of them."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


SettingsT = TypeVar("SettingsT", bound=Settings)


def value_of(config: Settings, option: str) -> object:
    """The value of a dotted option of nested settings."""
    return reduce(getattr, option.split("."), config)


def with_value(config: SettingsT, option: str, value: object) -> SettingsT:
    """A copy of nested frozen settings with another value of one dotted option."""
    name, _, inner = option.partition(".")
    return dataclasses.replace(config, **{name: with_value(getattr(config, name), inner, value) if inner else value})


@cache
def type_of(config_class: type, option: str) -> Any | None:
    """The type of a dotted option, or of a section; None where there is none."""
    kind: Any = config_class
    for name in option.split("."):
        kind = typing.get_type_hints(kind).get(name) if dataclasses.is_dataclass(kind) else None
    return kind


def kinds_of(kind: object) -> tuple:
    """The types of a union; a type that is none by itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def is_text(kind: object) -> bool:
    """Whether a word of the command line is such a value as it stands, whatever YAML would make of it."""
    kinds = kinds_of(kind)
    return str in kinds and not any((typing.get_origin(k) or k) in (dict, list) for k in kinds)


def may_be_null(kind: object, option: str) -> bool:
    """Whether null is a value of an option of that type, and none is not one of its own."""
    return type(None) in kinds_of(kind) and option.rpartition(".")[2] not in _WITH_NONE


def in_words(kind: Any) -> str:
    """A type, for people."""
    return _WORDS.get(typing.get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))
