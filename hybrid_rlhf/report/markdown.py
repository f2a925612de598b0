"""Render the summary of a run as Markdown, and cells and tables for every Markdown page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hybrid_rlhf.report.alarms import Alarm
from hybrid_rlhf.report.metric_names import meaning, shown
from hybrid_rlhf.report.run_summary import RunSummary
from hybrid_rlhf.report.terminal import last_line, last_turn, number, one_line

WIDTH = 160  # columns of a cell at most


def markdown(run: RunSummary) -> str:
    """The report as Markdown."""
    lines = [f"# Report of stage {run.stage}", "", *([f"**{cell(run.state, 600)}**", ""] if run.state else []),
             *(f"- {cell(line, 400)}" for line in run.header)]
    lines += [""] * bool(run.header) + [f"{line}\n" for line in run.first_step]
    lines += ["## Alarms", "", *alarm_lines(run.alarms), "", "## Curves", ""]
    lines += [f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in run.pictures] or [
        run.no_pictures or "Nothing to draw."]
    for title, rows in run.samples:
        cells = [[_value(name, value) for name, value in row.items()] for row in rows]
        lines += ["", f"## {title}", "", *table(list(rows[0]), cells)]
    lines += ["", "## Metrics", ""]
    lines += _metrics("the last step", run.last_step) if run.last_step else ["No step was taken."]
    lines += ["", *_metrics("held out", run.held_out)] if run.held_out else []
    if run.record:
        lines += ["", "## Made by", "", f"`{run.record.get('command', '')}`", "", run.versions]
    return "\n".join(lines) + "\n"


def _value(name: str, value: object) -> str:
    """A number or text as a cell; of a prompt the end of its last turn."""
    if isinstance(value, (int, float)):
        return number(value)
    return cell(last_line("", last_turn(str(value or "")), WIDTH) if name == "prompt" else value)


def cell(text: object, length: int = WIDTH) -> str:
    """Text for a cell of a table: one line, escaped for Markdown and terminals."""
    return re.sub(r"([|\\`*_<>\[\]!#~])", r"\\\1", one_line(str(text or ""), length))


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table; the cells must be escaped already."""
    return ["|" + "".join(f" {name} |" if name else " |" for name in names), "|" + "---|" * len(names),
            *("| " + " | ".join(row) + " |" for row in rows)]


def alarm_lines(alarms: Sequence[Alarm]) -> list[str]:
    """Alarms as list items, or a sentence that none went off."""
    return [f"- **{alarm.name}**: {alarm.text}" for alarm in alarms] or ["None of the alarms went off."]


def _metrics(title: str, row: dict) -> list[str]:
    values = [(name, shown(name, value)) for name, value in sorted(row.items()) if name != "step"]
    return table((f"{title} (step {row['step']})", "", ""), [
        (name.removeprefix("eval/"), text if isinstance(text, str) else number(text), meaning(name))
        for name, text in values])
