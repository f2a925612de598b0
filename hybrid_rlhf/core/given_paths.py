"""Paths from the user: ~ is expanded wherever a file or folder is named."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from hybrid_rlhf.core.errors import check
from hybrid_rlhf.core.options import SettingsT

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
