"""Dotted options of nested settings: frozen dataclasses whose fields are values or settings again."""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache, reduce
from typing import Any, ClassVar, Protocol, TypeVar

_WITH_NONE = ("quantize",)  # none: not quantised, whatever the model's own setting; null: as that says


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


@cache
def free_mappings(config_class: type, prefix: str = "") -> list[str]:
    """The dotted options whose values are mappings of anything."""
    hints = typing.get_type_hints(config_class)
    inner = [name for key, kind in hints.items() if isinstance(kind, type) and dataclasses.is_dataclass(kind)
             for name in free_mappings(kind, f"{prefix}{key}.")]
    return [f"{prefix}{key}" for key, kind in hints.items() if kind == dict[str, object]] + inner


WORDS = {dict: "a mapping", list: "a list", str: "text", int: "a whole number", float: "a number",
         bool: "true or false", type(None): "null"}
_CLASSES = ("class_path", "init_args")  # by which the parser would import what a setting names


def misfit(kind: object, value: object, name: str) -> str | None:
    """What is wrong with the shape of a value that is to become `kind`, or None. Mappings and lists stand only where
    `kind` has them, sections are mappings, and no key names a class; what a text says is left to the parser."""
    for key in value if isinstance(value, dict) else ():
        if key in _CLASSES:
            return f"{key} in {name or 'the settings'}; settings name no classes, give the options themselves"
        if not isinstance(key, str):
            return f"{name or 'the file'} has the key {key!r:.60}; a key must be text"
    if dataclasses.is_dataclass(kind):
        is_fine = value is None or isinstance(value, dict)
        return None if is_fine else f"{name} is a section; give a mapping of its options, or --{name}.OPTION"
    if not isinstance(value, (dict, list)):
        return None
    kinds = _members(kind)
    fits = [k for k in kinds if (typing.get_origin(k) or k) in (object, type(value))]
    if not fits:
        return f"{name} is {WORDS[type(value)]}; it must be {' or '.join(map(_in_words, kinds))}"
    inner = (typing.get_args(fits[0]) or (object,))[-1]
    each = value.items() if isinstance(value, dict) else enumerate(value)
    return next((fault for key, item in each if (fault := misfit(inner, item, f"{name}[{str(key)[:60]}]"))), None)


def is_text(kind: object) -> bool:
    """Whether a word of the command line is such a value as it stands, whatever YAML would make of it."""
    kinds = _members(kind)
    return str in kinds and not any((typing.get_origin(k) or k) in (dict, list) for k in kinds)


def _members(kind: object) -> tuple:
    """The types of a union; a type that is none by itself."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _in_words(kind: Any) -> str:
    return WORDS.get(typing.get_origin(kind) or kind, str(kind))


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
    return type(None) in typing.get_args(type_of(kind, option)) and option.rpartition(".")[2] not in _WITH_NONE
