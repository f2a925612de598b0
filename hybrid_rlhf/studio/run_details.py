"""One run, with all that its page shows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from hybrid_rlhf.report.metric_names import meaning
from hybrid_rlhf.report.plots import SUBJECTS
from hybrid_rlhf.studio import run_files
from hybrid_rlhf.studio.history_reader import Histories, History
from hybrid_rlhf.studio.run_files import MODEL, RECORD, SETTINGS, Unreadable
from hybrid_rlhf.studio.runs import RunList

PHASES = ("generate", "score", "teacher", "train", "switch")  # of a step; no two of them overlap
EVALUATION = "evaluate.md"  # of --stage evaluate
MAX_SETTINGS, MAX_CARD, MAX_LINES, MAX_LINE = 2**20, 2**18, 100, 2000


def details(runs: RunList, histories: Histories, run: str) -> dict:
    """GET /api/run. What cannot be read is left out, and "notes" has a line of it."""
    row, alarms = runs.row(run), runs.alarms(run)
    folder, notes = runs.outputs / run, []
    record: dict = {}
    try:
        record = run_files.read_object(folder / RECORD)
    except Unreadable as error:
        notes.append(str(error))
    measured: dict[str, list] = {"phases": [], "memory": [], "metrics": []}
    try:
        measured = histories.look(folder, _measured) or measured
        notes += measured.pop("notes", [])
    except Unreadable as error:
        notes.append(str(error))
    facts = record.get("facts")
    rows = runs.rows()[0]
    children = [each["id"] for each in rows if run in each["parents"]]
    known = [each["id"] for each in rows if each["id"] in (*row["parents"], *children)]  # which have a page
    return {"row": row, "children": children, "known": known, "command": _line(record.get("command")),
            "header": _lines(facts.get("header") if isinstance(facts, dict) else None),
            "settings": settings_text(folder, record, notes), "versions": _texts(record.get("versions")),
            "alarms": [{"name": alarm.name, "text": alarm.text} for alarm in alarms], **measured,
            "checkpoints": [each._asdict() for each in run_files.checkpoints(folder)],
            "has_report": (found := run_files.mark(folder / run_files.PAGE)) is not None and found[1] > 0,
            "card": _card(folder, notes), "evaluation": _evaluation(folder, notes), "notes": notes}


def _measured(history: History) -> dict:
    """Where the time went, the most memory, and which metrics there are."""
    names = history.names
    times = {name: history.total(f"time/{name}") for name in PHASES if f"time/{name}" in names}
    rest = history.total("time/step") - sum(times.values())
    if rest > 0:
        times["other" if times else "step"] = rest
    peaks = [name for name in names if name.startswith("memory/") and name.count("/") == 2]
    return {"phases": [{"name": name, "seconds": round(seconds, 3)} for name, seconds in times.items()],
            "memory": [{"name": name.removeprefix("memory/"), "bytes": int(history.highest(name))} for name in peaks],
            "metrics": described(names), "notes": history.notes}


def described(names: Iterable[str]) -> list[dict]:
    """Metrics with what they mean and the group that they are shown in."""
    return [{"name": name, "meaning": meaning(name), "group": group(name)} for name in names]


def group(name: str) -> str:
    """The subject that the report draws a metric under; of others the first part of the name."""
    plain = name.removeprefix("eval/")
    for subject in SUBJECTS:
        if any(re.fullmatch(pattern, plain) for pattern in subject.names):
            return subject.title
    return plain.partition("/")[0] if "/" in plain else "other"


def settings_text(folder: Path, record: dict, notes: list[str]) -> str:
    """config.yaml as it is; where there is none what run.json says."""
    try:
        text = run_files.read_text(folder / SETTINGS, MAX_SETTINGS)
    except Unreadable as error:
        notes.append(str(error))
        text = None
    if not text and isinstance(record.get("config"), dict):
        text = yaml.safe_dump(record["config"], sort_keys=False)
    return text or ""


def _card(folder: Path, notes: list[str]) -> str | None:
    if not run_files.is_folder(folder / MODEL):
        return None
    try:
        return run_files.read_text(folder / MODEL / "README.md", MAX_CARD)
    except Unreadable as error:
        notes.append(str(error))
        return None


def _evaluation(folder: Path, notes: list[str]) -> str | None:
    """What --stage evaluate found, as it wrote it for people."""
    if run_files.mark(folder / EVALUATION) is None:
        return None
    try:
        return run_files.read_text(folder / EVALUATION, MAX_CARD)
    except Unreadable as error:
        notes.append(str(error))
        return None


def _line(value: object) -> str:
    return value[:MAX_LINE * 10] if isinstance(value, str) else ""


def _lines(value: object) -> list[str]:
    return [line[:MAX_LINE] for line in value[:MAX_LINES] if isinstance(line, str)] if isinstance(value, list) else []


def _texts(value: object) -> dict[str, str]:
    return {name: text[:100] for name, text in list(value.items())[:MAX_LINES] if isinstance(text, str)} \
        if isinstance(value, dict) else {}
