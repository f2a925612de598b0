"""All options of a stage with kind, default and help, and settings as JSON, from the config classes.

Imports torch, as these do: for the process that answers the page's questions, not for the studio itself.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from hybrid_rlhf import cli
from hybrid_rlhf.core.config import Option
from hybrid_rlhf.core.config import options_of as options_of_class
from hybrid_rlhf.core.options import value_of
from hybrid_rlhf.data.sources import Source
from hybrid_rlhf.studio.settings_text import by_table, common_options
from hybrid_rlhf.training import unread_options
from hybrid_rlhf.training.registry import STAGES, variant_options

_KINDS = {bool: "bool", int: "int", float: "float", str: "text", list: "list", dict: "json"}
LEFT_OUT = ("stage", "output_dir")  # set by the goal and the run's name


def options_of(stage: str) -> dict:
    """{"options": [...], "help"} of a stage; KeyError for an unknown one."""
    row, common = STAGES[stage], common_options(stage)
    config_class = importlib.import_module(row.module).Config
    defaults, _ = cli.read_settings(stage, [])
    fixed = {*LEFT_OUT, *variant_options(stage)}
    options = [_option(stage, option, value_of(defaults, option.name), option.name in common)
               for option in options_of_class(config_class, unread_options.of_stage(stage)) if option.name not in fixed]
    order = {name: i for i, name in enumerate(common)}
    return {"help": row.help, "options": sorted(options, key=lambda o: order.get(o["name"], len(order)))}


def _option(stage: str, option: Option, default: object, is_common: bool) -> dict:
    return {"name": option.name, "section": option.name.rpartition(".")[0],
            "kind": "choice" if option.choices else _kind(option.kind), "choices": list(option.choices),
            "default": plain(default), "null": type(None) in typing.get_args(option.kind), "help": option.text,
            "by_table": by_table(stage, option.name), "is_common": is_common}


def _kind(kind: Any) -> str:
    """The name of a type; in a union a list comes before text, and text before a mapping."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    members = [typing.get_origin(k) or k for k in (typing.get_args(kind) if is_union else (kind,))]
    if dict in members and list in members:  # data.sources
        return "json"
    return next(_KINDS[k] for k in (list, str, dict, float, int, bool) if k in members)


# -- settings as JSON --------------------------------------------------------------------------------------------------


def plain_settings(config: object) -> dict[str, object]:
    """All options of nested settings, in order."""
    return dict(_leaves(config, ""))


def _leaves(config: object, prefix: str) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass of settings
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", plain(value)


def plain(value: object) -> object:
    """A value as JSON. A source with only a path becomes that text; numbers that are not finite become text."""
    if isinstance(value, Source):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        chosen = {k: v for k, v in fields.items() if k == "path" or (v and (k, v) != ("split", "train"))}
        return value.path if list(chosen) == ["path"] else chosen
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
