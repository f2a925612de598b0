"""Parse the models of --model (NAME=DIR, or DIR alone), and find their folders."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hybrid_rlhf.core import chat_runs
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
    """The model folder for `path`: for a run's folder the model in it. UserError for a learning chat's without one."""
    folder = Path(path)
    if not (folder / "run.json").is_file():
        return folder
    has_model = (folder / "model").is_dir()
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        is_chat, status = record["stage"] == chat_runs.STAGE, record["status"]
        line = _unfinished(record, record.get("facts", {}), path) if has_model else (
            f"{chat_runs.leaves_model(record['config'], path)}, leaves its model" if is_chat else "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return folder / "model" if has_model else folder
    check(has_model or not is_chat, f"the chat run in {path} is not finished ({status}); {line}")
    if has_model and status != "finished":
        print(f"note: the run in {path} is not finished ({status}); the model there is of {line}", file=sys.stderr)
    return folder / "model" if has_model else folder


def _unfinished(record: dict, facts: dict, run: str) -> str:
    """The step or run that the model of a run that is not finished is of."""
    step, last = facts.get("model_step"), facts.get("num_steps")
    if step is not None and record["stage"] == chat_runs.STAGE:
        return chat_runs.changed_since(step, last, record["config"], run)
    return "a run before it" if step is None else f"step {step} of {last}"


def learns_on(path: str, folder: str) -> str:
    """The model for a chat that learns in `folder`: `path`, and where that is the folder itself the one that its run
    began with, as the chat goes on from its marks (a line says so)."""
    if Path(path).resolve() not in (Path(folder).resolve(), Path(folder).resolve() / "model"):
        return path
    try:
        record = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
        base = str(record["config"]["model"]["model_name_or_path"]) if record["stage"] == chat_runs.STAGE else path
    except (OSError, ValueError, LookupError, TypeError):
        return path
    if base != path:
        print(f"{folder} has learnt on {base}, and goes on from there with its marks", file=sys.stderr)
    return base
