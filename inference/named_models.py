"""Parse the models of --model (NAME=DIR, or DIR alone), and find their folders."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from hybrid_rlhf.core import chat_runs
from hybrid_rlhf.core.config import UserError, check


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
    folder, record = Path(path), _record(path)
    if not (folder / "model").is_dir():
        if record.get("stage") == chat_runs.STAGE:
            raise UserError(f"the chat run in {path} is not finished ({record['status']}); "
                            f"{chat_runs.cure(chat_runs.STAGE, record['config'], path)}")
        return folder
    if record.get("status", "finished") != "finished":
        facts = record.get("facts", {})
        of = "a run before it" if facts.get("model_step") is None else (
            chat_runs.model_of(record["stage"], facts, record["config"], path))
        print(f"note: the run in {path} is not finished ({record['status']}); the model there is of {of}",
              file=sys.stderr)
    return folder / "model" if (folder / "run.json").is_file() else folder


def _record(run: str) -> dict:
    """The record of the run in a folder; empty where there is none, or a damaged one."""
    try:
        record = json.loads((Path(run) / "run.json").read_text(encoding="utf-8"))
        return record if isinstance(record, dict) and {"stage", "status", "config"} <= record.keys() else {}
    except (OSError, ValueError):
        return {}


def learns_on(path: str, folder: str) -> str:
    """The model for a chat that learns in `folder`: `path`, and where that is the folder itself the one that its run
    began with, as the chat goes on from its marks (a line says so)."""
    run, record = Path(folder).resolve(), _record(folder)
    if Path(path).resolve() not in (run, run / "model") or record.get("stage") != chat_runs.STAGE:
        return path
    base = record["config"]["model"]["model_name_or_path"]
    print(f"{folder} has learnt on {base}, and goes on from there with its marks", file=sys.stderr)
    return base
