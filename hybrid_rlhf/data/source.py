"""A place that rows come from, as the settings name it (a path, or a mapping with a path), and what a stage reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import NamedTuple

from hybrid_rlhf.core.config import check, nearest


@dataclass(frozen=True)
class Source:
    """One place that rows come from.

    Attributes:
        path: demo/demonstrations, demo/preferences, demo/prompts; a jsonl, json, csv, tsv, txt or parquet file (.gz
            too); a folder of such files or a saved data set; or a hub id.
        name: Configuration of a hub data set, or subfolder of a folder.
        split: Which split (a single file has no splits and is read whole).
        weight: Share of the training rows relative to the other sources' weights. Without any weight every row is
            used once per epoch; give weights to all sources or to none.
        columns: Our column names and theirs, such as {prompt: question}.
        stages: Stages that read this source; empty means every stage it has the columns for.
    """

    path: str
    name: str | None = None
    split: str = "train"
    weight: float | None = None
    columns: dict[str, str] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        check(bool(self.path), "data.sources: a source has no path; give a file, a folder, a hub id or demo/<name>")
        check(self.weight is None or 0 < self.weight < float("inf"),
              f"data.sources: weight of {self.path} is {self.weight}; it must be positive")


class Reads(NamedTuple):
    """The rows that a stage trains on, or samples from.

    stage: its name, as `stages` of a source has it. kind: what is made of an example (MAKERS in examples.py). share:
    the position in data.split.
    """

    stage: str
    kind: str
    share: int


Named = Source | str | PurePath | Mapping  # one source, as a user may name it


def as_sources(given: Sequence[Named] | Named | None, option: str = "data.sources") -> list[Source]:
    """What stands at data.sources (or `option`) as a list of Source: one source or a list, each a path or a mapping.

    Settings are data: a mapping is read key by key, and nothing that it names is imported. UserError for what is
    neither, for unknown keys and for values of the wrong type.
    """
    if given is None:
        return []
    items = given if isinstance(given, (list, tuple)) else [given]
    return [item if isinstance(item, Source) else _source(item, option) for item in items]


def _source(item: object, option: str) -> Source:
    if isinstance(item, (str, PurePath)):
        check(not str(item).startswith(("[", "{")), f"{option}: {item} is no path; write a path, or a list such as "
                                                    "[a.jsonl, {path: b.jsonl}]")
        return Source(str(item))
    check(isinstance(item, Mapping), f"{option}: {item!r:.60} is no source; give a path, or {{path: ...}}")
    known = [f.name for f in fields(Source)]
    for key, value in item.items():
        check(key in known, f"unknown key {key} in {option}{nearest(str(key), known)}; its keys are "
                            f"{', '.join(known)}")
        check(_fits(key, value), f"{option}: {key} is {value!r:.60}; it must be {_KINDS[key]}")
    check("path" in item, f"{option}: {dict(item)} has no path; give a file, a folder, a hub id or demo/<name>")
    values = {key: value for key, value in item.items() if value is not None}
    return Source(**values | {"path": str(values["path"])})


_KINDS = {"path": "text", "name": "text or null", "split": "text", "weight": "a number or null",
          "columns": "a mapping of names, such as {prompt: question}", "stages": "a list of stages, such as [sft]"}


def _fits(key: str, value: object) -> bool:
    if value is None:
        return key != "path"
    if key == "weight":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if key == "columns":
        return isinstance(value, Mapping) and all(isinstance(v, str) for v in (*value, *value.values()))
    if key == "stages":
        return isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
    return isinstance(value, str) or (key == "path" and isinstance(value, PurePath))
