"""The addresses behind the page for a new run: what one may want, the options, the file of settings, and the looks at
data, examples and memory before anything is started."""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

from hybrid_rlhf.memory_plan.presets import CARDS
from hybrid_rlhf.studio.goals import goals_answer
from hybrid_rlhf.studio.look import Look
from hybrid_rlhf.studio.studio import Route, Studio

_CARD_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and that of WSL
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
MAX_LEVELS = 4  # below outputs, in which runs are found


def routes(studio: Studio, look: Look) -> list[Route]:
    known_options = cache(lambda stage: look.ask("options", {"stage": stage}, f"options {stage}"))

    @cache
    def card() -> str:
        return str(look.ask("card", {})["card"])

    def goals(_query: dict, _body: dict) -> dict:
        found = "cpu"
        if sys.platform != "darwin" and any(os.path.exists(path) for path in _CARD_FILES):
            found = card()
        return goals_answer(found, {name: row.settings for name, row in CARDS.items()})

    def options(query: dict, _body: dict) -> dict:
        return known_options(str(query.get("stage")))

    def settings(_query: dict, body: dict) -> dict:
        name, error = body.get("run"), None
        if name:
            error = _name_error(studio, name)
        file = f"{str(name).rpartition('/')[2]}.yaml" if name and not error else "settings.yaml"
        folder = _shown(studio.outputs / name) if name and not error else None
        asked = {key: body.get(key) for key in ("stage", "settings", "card")}
        answer = look.ask("settings", asked | {"output_dir": folder, "run_error": error})
        return answer | {"file": file, "command": f"hybrid-rlhf --stage {body.get('stage')} --config {file}"}

    def asked_with(kind: str, *keys: str) -> Route:
        return Route("POST", f"/api/{kind}", lambda _query, body: look.ask(kind, {key: body.get(key) for key in keys}))

    return [Route("GET", "/api/goals", goals), Route("GET", "/api/options", options),
            Route("POST", "/api/settings", settings), asked_with("data", "path", "stage", "columns"),
            asked_with("preview", "stage", "settings", "card"),
            asked_with("plan", "stage", "settings", "card", "memory")]


def _name_error(studio: Studio, name: object) -> str | None:
    """Why a new run cannot have this name, or None."""
    parts = name.split("/") if isinstance(name, str) else [""]
    if len(parts) > MAX_LEVELS or not all(map(_PART.fullmatch, parts)):
        return ("a run's name has letters (a to z), digits, _, - and dots, and may be in folders, such as demo/ppo "
                f"(at most {MAX_LEVELS} levels)")
    if os.path.lexists(studio.outputs.joinpath(*parts)):
        return f"there is a folder {name} already; choose another name"
    return None


def _shown(folder: Path) -> str:
    """Relative to where the studio was started, where it is below that: such a file works elsewhere too."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
