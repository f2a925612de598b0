"""The models that --model names: NAME=DIR, or DIR alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.core.config import check


@dataclass(frozen=True)
class NamedModel:
    """A model: its name for clients and people, and where it is."""

    name: str
    path: str


def named_models(given: list[str]) -> list[NamedModel]:
    """NAME=DIR, or DIR, whose name is then the folder's own, or its run's where it is called model."""
    found = []
    for text in given:
        named = re.match(r"([\w.:-]+)=(.+)", text)
        path = named.group(2) if named else text
        parts = [p for p in Path(path).parts if p not in ("/", ".", "..")]
        own = parts[-2] if len(parts) > 1 and parts[-1] == "model" else parts[-1] if parts else path
        found.append(NamedModel(named.group(1) if named else own if Path(path).is_dir() else path, path))
    names = [p.name for p in found]
    for name in names:
        check(names.count(name) == 1, f"--model: two models are called {name}; name them: --model a=DIR b=DIR")
    return found
