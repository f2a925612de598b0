"""Write report.md and report.html of a run: read its files into a RunSummary, which markdown.py and html.py render."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.report.alarms import Alarm, answered, find
from hybrid_rlhf.report.html import html
from hybrid_rlhf.report.markdown import alarm_lines, cell, markdown, table
from hybrid_rlhf.report.plots import PLOTS, draw
from hybrid_rlhf.report.run_summary import RunSummary
from hybrid_rlhf.report.terminal import number, one_line

REPORT, PAGE, METRICS = "report.md", "report.html", "metrics.jsonl"
SAMPLES, ANSWERS = "samples.jsonl", "answers.jsonl"
NUM_SHOWN = 4  # samples


def conclude(folder: Path, stage: str, metrics: str = METRICS,
             warn: Callable[[str], None] = lambda _text: None,
             show: Callable[[list[Path]], None] = lambda _paths: None, state: str = "") -> list[Alarm]:
    """Read the run's history, look for alarms, and write plots/, report.md and report.html; returns the alarms.

    Raises nothing for what cannot be drawn or written, as the run has yet to export its model: `warn` gets a message.
    `show` gets the pictures that were drawn. state: how far the run is, where it has not ended well.
    """
    run = replace(summarize(folder, stage, metrics, warn), state=state)
    show(run.pictures)
    for name, text in ((REPORT, markdown(run)), (PAGE, html(f"{folder.resolve().name}: stage {stage}", [run]))):
        try:
            write_file(folder / name, text)
        except (OSError, UserError) as error:  # UserError: the path is a link
            warn(f"cannot write {folder / name}: {getattr(error, 'strerror', None) or error}")
    return run.alarms


def compare_stages(folder: Path, stages: list[str], table: list[dict], answers: list[dict]) -> Path:
    """Write folder/report.html on the finished stages in folder/STAGE, with `table` (rows of each stage's results) on
    top and below it `answers`, each model's answers to the same prompts."""
    runs = [summarize(folder / stage, stage) for stage in stages if (folder / stage / METRICS).exists()]
    path = folder / PAGE
    write_file(path, html(folder.resolve().name, runs, table, answers))
    return path


def summarize(folder: Path, stage: str, metrics: str = METRICS,
              warn: Callable[[str], None] = lambda _text: None) -> RunSummary:
    """The summary of the run in `folder`; draws its plots."""
    history = read_history(folder / metrics)
    try:
        pictures, why = draw(history, folder), ""
    except ImportError:
        pictures, why = [], "No plots: matplotlib is not installed (pip install 'hybrid-rlhf[report]')."
    except Exception as error:  # errors in matplotlib, its fonts and caches
        words = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(str(error), 200)}"
        pictures, why = [], f"No plots: {words}."
        warn(f"cannot draw {folder / PLOTS}: {words}")
    samples, answers = (read_history(path) if (path := folder / name).exists() else [] for name in (SAMPLES, ANSWERS))
    record = json.loads((folder / "run.json").read_text(encoding="utf-8")) if (folder / "run.json").exists() else {}
    before, after = before_and_after(samples, answers)
    alarms = find(history) + (answered(after) if answers else [])
    return RunSummary(stage, alarms, history, pictures, why, before, after, record)


def before_and_after(samples: list[dict], answers: list[dict]) -> tuple[list[dict], list[dict]]:
    """The answers to the fixed prompts before and after training, else the first and the last samples of a run. The
    first list is empty where there is only one set."""
    rows = answers or [row for step in sorted({row["step"] for row in samples})
                       for row in [each for each in samples if each["step"] == step][:NUM_SHOWN]]
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return [], []
    first, last = ([row for row in rows if row["step"] == step] for step in (steps[0], steps[-1]))
    return (first if len(steps) > 1 else []), last


def read_history(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl; an incomplete last line, which a crash leaves, is skipped."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def conclude_comparison(folder: Path, title: str, rows: list[dict], alarms: list[Alarm]) -> None:
    """Write folder/report.md on a comparison of models: alarms, and a table with a row of figures for each model."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"# {title}", "", "## Alarms", "", *alarm_lines(alarms), "", "## Held-out prompts", "",
             *table(names, [[number(v) if isinstance(v := row.get(name), (int, float)) else cell(v) for name in names]
                            for row in rows])]
    write_file(folder / REPORT, "\n".join(lines) + "\n")
