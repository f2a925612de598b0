"""Parse the models of --model (NAME=DIR, or DIR alone), and find their folders."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hybrid_rlhf.core.config import check


def named_models(options: list[str]) -> dict[str, str]:
    """Name -> path, from NAME=DIR, or from DIR with the folder's name (the run's name for a folder called model)."""
    models: dict[str, str] = {}
    for text in options:
        named = re.match(r"([\w.:-]+)=(.+)", text)
        path = named.group(2) if named else text
        parts = [p for p in Path(path).parts if p not in ("/", ".", "..")]
        folder = parts[-2] if len(parts) > 1 and parts[-1] == "model" else parts[-1] if parts else path
        name = named.group(1) if named else folder if Path(path).is_dir() else path
        check(name not in models, f"--model: two models are called {name}; name them: --model a=DIR b=DIR")
        models[name] = path
    return models


def model_folder(path: str) -> Path:
    """The model folder for `path`: for a run's folder the model in it."""
    folder = Path(path)
    if not (folder / "run.json").is_file() or not (folder / "model").is_dir():
        return folder
    _note_unfinished(folder)
    return folder / "model"


def _note_unfinished(run: Path) -> None:
    """Print a note if the run in a folder is not finished: its model is from an earlier step or run."""
    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        status, step = record["status"], record.get("facts", {}).get("model_step")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    if status != "finished":
        of = "a run before it" if step is None else f"step {step} of {record['facts'].get('num_steps')}"
        print(f"note: the run in {run} is not finished ({status}); the model there is of {of}", file=sys.stderr)
