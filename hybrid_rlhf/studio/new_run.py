"""The addresses behind the page for a new run: what one may want, the options, the file of settings, and the looks at
data, examples and memory before anything is started."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

from hybrid_rlhf.memory_plan.presets import CARDS
from hybrid_rlhf.studio.goals import goals_answer
from hybrid_rlhf.studio.job_settings import new_folder
from hybrid_rlhf.studio.look import Look
from hybrid_rlhf.studio.studio import Refused, Route, Studio

_CARD_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and that of WSL


def routes(studio: Studio, look: Look) -> list[Route]:
    known_options = cache(lambda stage: look.ask("options", {"stage": stage}, f"options {stage}"))
    known_card = cache(found_card)

    def goals(_query: dict, _body: dict) -> dict:
        try:
            card, note = known_card(), None
        except Refused as error:  # asked again the next time
            card, note = "cpu", f"the card could not be looked at: {error}"
        return goals_answer(card, {name: row.settings for name, row in CARDS.items()}) | {"card_note": note}

    def options(query: dict, _body: dict) -> dict:
        return known_options(str(query.get("stage")))

    def settings(_query: dict, body: dict) -> dict:
        folder, error, file = None, None, "settings.yaml"
        if body.get("run"):
            try:
                found = new_folder(studio, body["run"])
                folder, file = _shown(found), f"{found.name}.yaml"
            except Refused as refusal:
                error = str(refusal)
        asked = {key: body.get(key) for key in ("stage", "settings", "card")}
        answer = look.ask("settings", asked | {"output_dir": folder, "run_error": error})
        return answer | {"file": file, "command": f"hybrid-rlhf --stage {body.get('stage')} --config {file}"}

    def asked_with(kind: str, *keys: str) -> Route:
        return Route("POST", f"/api/{kind}", lambda _query, body: look.ask(kind, {key: body.get(key) for key in keys}))

    return [Route("GET", "/api/goals", goals), Route("GET", "/api/options", options),
            Route("POST", "/api/settings", settings),
            asked_with("data", "path", "stage", "columns", "name", "split"),
            asked_with("preview", "stage", "settings", "card"),
            asked_with("plan", "stage", "settings", "card", "memory")]


def found_card() -> str:
    """The preset for this machine's first GPU, or cpu. Asked of a process of its own, which holds nothing of the card
    afterwards; not where there is none."""
    if sys.platform == "darwin" or not any(os.path.exists(path) for path in _CARD_FILES):
        return "cpu"
    look = Look()
    try:
        return str(look.ask("card", {})["card"])
    finally:
        look.close()


def _shown(folder: Path) -> str:
    """Relative to where the studio was started, where it is below that: such a file works elsewhere too."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
