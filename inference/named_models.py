"""The models that --model names (NAME=DIR, or DIR alone), and the folders that they are in."""

from __future__ import annotations

import json
import re
import sys
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


def model_folder(path: str) -> Path:
    """A run's folder stands for the model in it."""
    folder = Path(path)
    if not (folder / "run.json").is_file() or not (folder / "model").is_dir():
        return folder
    _tell_unfinished(folder)
    return folder / "model"


def _tell_unfinished(run: Path) -> None:
    """A line on stderr where the model in a run's folder is not that of the run that its record tells of."""
    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        status, step = record["status"], record.get("facts", {}).get("model_step")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    if status != "finished":
        of = "a run before it" if step is None else f"step {step} of {record['facts'].get('num_steps')}"
        print(f"note: the run in {run} is not finished ({status}); the model there is of {of}", file=sys.stderr)
