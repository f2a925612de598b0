"""What a run came to: report.md with its alarms in words and its last metrics."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_rlhf.run.alarms import Alarm, find
from hybrid_rlhf.run.terminal import number

REPORT = "report.md"
_SILENT = "None of the alarms went off."


def conclude(folder: Path, stage: str, metrics: str = "metrics.jsonl") -> list[Alarm]:
    """Read the run's history, look for alarms, and write report.md; returns the alarms."""
    history = read_history(folder / metrics)
    found = find(history)
    (folder / REPORT).write_text(page(stage, history, found), encoding="utf-8")
    return found


def read_history(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; a torn last line, which a crash leaves, is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def page(stage: str, history: list[dict], found: list[Alarm]) -> str:
    """The report as Markdown."""
    steps = [row for row in history if not any(name.startswith("eval/") for name in row)]
    held_out = [row for row in history if any(name.startswith("eval/") for name in row)]
    lines = [f"# Report of stage {stage}", "", "## Alarms", "", *alarm_lines(found), "", "## Metrics", ""]
    lines += _table("the last step", steps[-1]) if steps else ["No step was taken."]
    lines += ["", *_table("held out", held_out[-1])] if held_out else []
    return "\n".join(lines) + "\n"


def alarm_lines(found: list[Alarm]) -> list[str]:
    """Alarms as list items, or the sentence that there are none."""
    return [f"- **{alarm.name}**: {alarm.text}" for alarm in found] or [_SILENT]


def _table(title: str, row: dict) -> list[str]:
    values = [(name.removeprefix("eval/"), value) for name, value in sorted(row.items()) if name != "step"]
    return [f"| {title} (step {row['step']}) | |", "|---|---|",
            *(f"| {name} | {'not a number' if value is None else number(value)} |" for name, value in values)]
