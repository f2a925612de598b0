"""Several runs beside each other: settings that differ, answers to the same prompts, and metrics that they have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from hybrid_rlhf.studio import run_files, sample_reader
from hybrid_rlhf.studio.history_reader import Histories
from hybrid_rlhf.studio.run_details import described
from hybrid_rlhf.studio.run_files import RECORD, Unreadable
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import Refused

MAX_RUNS, MAX_PROMPTS, MAX_OPTIONS = 8, 50, 300
T = TypeVar("T")
NO_MATTER = ("output_dir", "resume", "report_to")  # settings that change nothing in the result


def compare(runs: RunList, histories: Histories, ids: str) -> dict:
    """GET /api/compare: ids is a,b,c, two runs at least."""
    names = list(dict.fromkeys(name for name in ids.split(",") if name))
    if not 2 <= len(names) <= MAX_RUNS:
        raise Refused(400, f"choose 2 to {MAX_RUNS} runs to compare")
    rows = [runs.row(name) for name in names]
    notes: list[str] = []
    settings: list[dict] = []
    said: list[list[dict]] = []
    found: dict[str, None] = {}
    for name in names:
        own, answers, metrics = _parts(runs.outputs / name, histories, notes)
        settings.append(own)
        said.append(answers)
        found |= dict.fromkeys(metrics)
    return {"runs": rows, "differ": differing(settings), "prompts": side_by_side(said), "metrics": described(found),
            "notes": notes}


def _parts(folder: Path, histories: Histories, notes: list[str]) -> tuple[dict, list[dict], list[str]]:
    """Settings, newest answers and metrics of a run, as far as they can be read."""
    def read(reader: Callable[[], T | None], default: T) -> T:
        try:
            found = reader()
        except Unreadable as error:
            notes.append(f"{folder.name}: {error}")
            return default
        return default if found is None else found

    return (read(lambda: _settings(folder), {}), read(lambda: sample_reader.newest_answers(folder), []),
            read(lambda: histories.look(folder, lambda history: history.names), []))


def _settings(folder: Path) -> dict:
    config = run_files.read_object(folder / RECORD).get("config")
    return flat(config) if isinstance(config, dict) else {}


def flat(settings: Mapping, before: str = "") -> dict[str, object]:
    """Dotted option -> value; lists are values."""
    found: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def differing(settings: list[dict]) -> list[dict]:
    """The options that are not the same in all runs that have them, by the values; null where a run has none."""
    found = []
    for option in dict.fromkeys(option for each in settings for option in each):
        values = [each[option] for each in settings if option in each]
        if option not in NO_MATTER and any(value != values[0] for value in values[1:]):
            found.append({"option": option, "values": [each.get(option) for each in settings]})
    return found[:MAX_OPTIONS]


def side_by_side(said: list[list[dict]]) -> list[dict]:
    """Each prompt with every run's answer to it, None where it has none; what most runs answer comes first. A reward
    model's two responses to a prompt are two rows, by their side."""
    table: dict[tuple[str, str], list[dict | None]] = {}
    for place, rows in enumerate(said):
        for row in rows:
            key = str(row.get("prompt", "")), str(row.get("side", ""))
            table.setdefault(key, [None] * len(said))[place] = row
    order = sorted(table.items(), key=lambda item: sum(answer is None for answer in item[1]))
    return [{"prompt": prompt, "answers": answers} for (prompt, _), answers in order[:MAX_PROMPTS]]
