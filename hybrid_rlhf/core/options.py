"""Dotted options of nested settings: frozen dataclasses whose fields are values or settings again."""

from __future__ import annotations

import dataclasses
import os
import re
import types
import typing
from collections.abc import Iterable
from functools import cache, reduce
from typing import Any, ClassVar, Protocol, TypeVar

from hybrid_rlhf.core.errors import check, nearest

_WITH_NONE = ("quantize",)  # none: not quantised, whatever the model's own setting; null: as that says
_WORDS = {dict: "a mapping", list: "a list", str: "text", int: "a whole number", float: "a number",
          bool: "true or false", type(None): "null"}
# Names that people know from elsewhere -> the same option here, by its last name; a dotted one is of that section.
_ELSEWHERE = {"lr": "learning_rate", "batch_size": "per_device_train_batch_size",
              "train_batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
              "epochs": "num_train_epochs", "num_epochs": "num_train_epochs", "steps": "max_steps",
              "scheduler": "lr_scheduler_type", "warmup_steps": "warmup_ratio", "grad_clip": "max_grad_norm",
              "model_name": "model_name_or_path", "torch_dtype": "dtype", "bf16": "dtype", "fp16": "dtype",
              "max_seq_length": "max_length", "max_seq_len": "max_length", "dataset_name": "sources",
              "dataset": "sources", "lora_r": "lora.r", "lora_rank": "lora.r", "lora_alpha": "lora.alpha",
              "lora_dropout": "lora.dropout", "num_generations": "num_samples",
              "max_completion_length": "sampling.max_new_tokens", "resume_from_checkpoint": "resume",
              "beta": "kl_coef", "epsilon": "cliprange", "num_iterations": "num_ppo_epochs"}


class Settings(Protocol):
    """A dataclass: a section of the settings, or all of them."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


SettingsT = TypeVar("SettingsT", bound=Settings)


def one_of(default: Any, choices: Iterable[str]) -> Any:
    """A field whose value is one of these."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def within(default: Any, interval: str) -> Any:
    """A field whose value is a number in an interval such as "[0, 1)", or "[1,", which has no upper end."""
    return dataclasses.field(default=default, metadata={"interval": interval})


def check_values(section: Settings, prefix: str) -> None:
    """UserError for a field whose value is none of its choices, or out of its interval. Null is where its type is.

    prefix: of the section's options, such as "train.".
    """
    for field in dataclasses.fields(section):
        value, or_null = getattr(section, field.name), "None" in str(field.type)
        if value is None and or_null:
            continue
        choices, interval = field.metadata.get("choices"), field.metadata.get("interval")
        check(choices is None or value in choices, f"{prefix}{field.name} is {value!r}; choose "
                                                   f"{', '.join(choices or ())}{nearest(str(value), choices or ())}")
        check(interval is None or (isinstance(value, (int, float)) and _is_in(value, interval or "")),
              f"{prefix}{field.name} is {value}; it {_range(interval or '', field.default)}"
              f"{', or null' if or_null else ''}")


def _is_in(value: float, interval: str) -> bool:
    low, high = (part.strip() for part in interval[1:].rstrip(")]").split(","))
    is_above = value >= float(low) if interval[0] == "[" else value > float(low)
    return is_above and (not high or (value <= float(high) if interval[-1] == "]" else value < float(high)))


def _range(interval: str, default: Any) -> str:
    low, _, high = interval.partition(",")
    if high.strip() not in ("", "inf)"):
        return f"must lie in {interval}" + ("" if default is None else f", such as {default:g}")
    words = {"[0": "must not be negative", "(0": "must be positive"}.get(low, f"must be at least {low[1:]}")
    return f"{words}, and finite" if high else words


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


def of_list(kind: object) -> Any | None:
    """The type of the items where a list may stand; None where none may."""
    return next((typing.get_args(k)[0] for k in kinds_of(kind) if typing.get_origin(k) is list), None)


def of_mapping(kind: object) -> Any | None:
    """The type of the values where a mapping may stand; None where none may."""
    return next(((typing.get_args(k) or (object,))[-1] for k in kinds_of(kind) if (typing.get_origin(k) or k) is dict),
                None)


def holds_null(kind: object) -> bool:
    """Whether null may be given: as itself, or for an empty list where a list may stand and text may not."""
    return type(None) in kinds_of(kind) or (of_list(kind) is not None and str not in kinds_of(kind))


def none_is_null(kind: object, option: str) -> bool:
    """Whether none is null for an option of that type, and not a value of its own."""
    return holds_null(kind) and option.rpartition(".")[2] not in _WITH_NONE


def in_words(kind: Any) -> str:
    """A type, for people."""
    return _WORDS.get(typing.get_origin(kind) or kind, getattr(kind, "__name__", str(kind)))


def nearest_option(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the option that `name` stands for: of the same last name, or of what that is called
    here, in the section given if there is one (else not of a judge's or a teacher's, whose options repeat names of the
    policy's); otherwise for the one named most like it, or nothing."""
    known, (section, _, last) = list(known), name.rpartition(".")
    same = next((there for meant in (_ELSEWHERE.get(last, last), last)
                 if (there := [option for option in known if f".{option}".endswith(f".{meant}")])), [])
    same.sort(key=lambda each: (not each.startswith(f"{section}."), each.startswith(("reward.", "distill.")),
                                each.count(".")))
    if same and name not in known:
        return f" (did you mean {same[0]}?)"
    return nearest(name, known)


# -- paths from the user: ~ is expanded wherever a file or folder is named ---------------------------------------------


# Options, and keys of a data source, that name files and folders: one path, NAME=PATH, path.py:name, or a list.
_PATHS = ("output_dir", "resume", "model_name_or_path", "tokenizer_name_or_path", "cache_dir", "sources",
          "eval_sources", "path", "functions", "models", "reference", "model", "rubric", "template", "cache", "labels",
          "data", "output", "reward_model")


def expanded(path: str) -> str:
    """`path`, or NAME=path, with ~ or ~user at the path's beginning expanded. UserError where there is no such user:
    files would be written to a folder of that name."""
    named = re.match(r"[\w.:-]+=(?=~)", path)
    start = named.end() if named else 0
    written_out = os.path.expanduser(path[start:])
    check(not written_out.startswith("~"), f"{path}: the home folder of {path[start:].partition('/')[0]} is not known; "
                                           "write the path out, or ./ before it where it is a name")
    return path[:start] + written_out


def nearest_path(path: str) -> str:
    """' (did you mean X?)' for what lies in the same folder and is named most like `path`, or nothing."""
    folder, name = os.path.split(path.rstrip("/"))
    try:
        there = os.listdir(folder or ".")
    except OSError:
        return ""
    swapped = [each for each in there if sorted(each) == sorted(name)]  # stf for sft: less alike than the cutoff
    return nearest(name, there, cutoff=0.75) or nearest(name, swapped)  # what ends in .jsonl alone is not alike


def with_homes(settings: SettingsT) -> SettingsT:
    """Nested settings with ~ expanded wherever an option names files or folders."""
    def written_out(value: Any) -> Any:
        if isinstance(value, list):
            return [written_out(each) for each in value]
        return expanded(value) if isinstance(value, str) else with_homes(value) if is_part(value) else value

    def is_part(value: Any) -> bool:
        return dataclasses.is_dataclass(value) and not isinstance(value, type)

    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    changed = {name: new for name, value in values.items() if name in _PATHS or is_part(value)
               if (new := written_out(value)) != value}
    return dataclasses.replace(settings, **changed) if changed else settings
