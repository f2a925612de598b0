"""Which runs can be talked to, and through what: the model that one has left, or else its newest checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.studio import file_lock
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.studio.studio_files import read_json
from hybrid_rlhf.training.registry import STAGES

MAX_DEPTH = 4  # of a run below the outputs
POLICY, REWARD = "policy", "reward model"
_CHECKPOINT = re.compile(r"step-(\d{1,12})")


class Talkable(NamedTuple):
    """A run, and what it is talked to through. status: RunRow's. path: of a model's folder, or with `step` of the
    checkpoint of that step; None where there is neither, and `why` says so."""

    id: str
    stage: str
    status: str
    kind: str
    started: str = ""
    path: Path | None = None
    step: int | None = None
    why: str | None = None

    def row(self) -> dict:
        """For the page."""
        return {"id": self.id, "stage": self.stage, "status": self.status, "step": self.step, "kind": self.kind,
                "why": self.why}


def talkables(studio: Studio) -> list[Talkable]:
    """Of all runs that leave a model, the newest first."""
    found = [_talkable(studio, folder) for folder in _runs(studio.outputs, MAX_DEPTH)]
    return sorted((each for each in found if each is not None), key=lambda each: (each.started, each.id), reverse=True)


def talkable(studio: Studio, name: object, kind: str) -> Talkable:
    """The run of an id, as it is now. Refused for none, for one of another kind, and for one without a model."""
    found = _talkable(studio, studio.folder(name))
    if found is None:
        raise Refused(404, f"there is no model of {str(name)[:100]!r}")
    if found.kind != kind:
        meant = "answers, and gives no scores" if found.kind == POLICY else "gives scores, and cannot answer"
        raise Refused(400, f"{found.id} is a {found.kind}: it {meant}")
    if found.path is None:
        raise Refused(409, f"{found.id}: {found.why}")
    return found


def _runs(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a run.json, at most `depth` below `folder`; links and folders with a dot are passed over."""
    try:
        inner = [Path(entry.path) for entry in os.scandir(folder)
                 if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")]
    except OSError:
        return
    for each in inner:
        if (each / "run.json").is_file():
            yield each
        elif depth > 1:
            yield from _runs(each, depth - 1)


def _talkable(studio: Studio, folder: Path) -> Talkable | None:
    record = read_json(folder / "run.json") or {}
    stage, status = record.get("stage"), record.get("status")
    if not isinstance(stage, str) or not isinstance(status, str):
        return None
    kind = STAGES[stage].leaves if stage in STAGES else POLICY  # a stage of the user's own leaves one
    if kind is None:
        return None
    if status == "running" and not file_lock.is_held(folder / "config.yaml"):
        status = "lost"
    started = record.get("started")
    row = Talkable(folder.relative_to(studio.outputs).as_posix(), stage, status, kind,
                   started if isinstance(started, str) else "")
    if status == "finished" and (folder / "model" / "config.json").is_file():
        return row._replace(path=folder / "model")
    step = newest_step(folder / "checkpoints")
    if step is None:
        return row._replace(why="it has no checkpoint yet" if status == "running" else "it left no model and no "
                                                                                       "checkpoint")
    return row._replace(path=folder / "checkpoints" / f"step-{step:08d}", step=step)


def newest_step(folder: Path) -> int | None:
    """Of the checkpoints in a run's folder; one appears whole, its manifest in it."""
    try:
        names = [_CHECKPOINT.fullmatch(entry.name) for entry in os.scandir(folder)
                 if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return None
    steps = [int(name[1]) for name in names if name and (folder / name[0] / "manifest.json").is_file()]
    return max(steps, default=None)
