"""The report of a run: its files read into a RunSummary, which is written as report.md and report.html."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path

from hybrid_rlhf.algorithms.reward_signal import RewardSignal, figures, verdict
from hybrid_rlhf.core.image_files import thumbnails
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.report.alarms import Alarm, answered, find
from hybrid_rlhf.report.metric_names import meaning, shown
from hybrid_rlhf.report.plots import PLOTS, draw
from hybrid_rlhf.report.terminal import duration, last_line, last_turn, number, one_line, remarks

REPORT, PAGE, METRICS = "report.md", "report.html", "metrics.jsonl"
SAMPLES, ANSWERS = "samples.jsonl", "answers.jsonl"
FORK = "fork.json"  # of a run that went on from a step of another one: of, step, changed, differs
NUM_SHOWN = 4  # samples
FEW_CALLS, MANY_FAILED = 0.02, 0.5  # shares
WIDTH = 160  # columns of a cell at most


def conclude(folder: Path, stage: str, warn: Callable[[str], None] = lambda _text: None,
             show: Callable[[list[Path]], None] = lambda _paths: None, state: str = "") -> list[Alarm]:
    """Read the run's history, look for alarms, and write plots/, report.md and report.html; returns the alarms.

    Raises nothing for what cannot be drawn or written, as the run has yet to export its model: `warn` gets a message.
    `show` gets the pictures that were drawn. state: how far the run is, where it has not ended well.
    """
    run = replace(summarize(folder, stage, warn), state=state)
    show(run.pictures)
    for name, text in ((REPORT, markdown(run)), (PAGE, html(f"{folder.resolve().name}: stage {stage}", [run]))):
        try:
            write_file(folder / name, text)
        except OSError as error:
            warn(f"cannot write {folder / name}: {error.strerror}")
    return run.alarms


def compare_stages(folder: Path, stages: list[str], table: list[dict], answers: list[dict]) -> Path:
    """Write folder/report.html on the finished stages in folder/STAGE, with `table` (rows of each stage's results) on
    top and below it `answers`, each model's answers to the same prompts."""
    runs = [summarize(folder / stage, stage) for stage in stages if (folder / stage / METRICS).exists()]
    path = folder / PAGE
    write_file(path, html(folder.resolve().name, runs, table, answers))
    return path


def summarize(folder: Path, stage: str, warn: Callable[[str], None] = lambda _text: None) -> RunSummary:
    """The summary of the run in `folder`; draws its plots."""
    history = read_history(folder / METRICS)
    try:
        pictures, why = draw(history, folder), ""
    except ImportError:
        pictures, why = [], "No plots: matplotlib is not installed (pip install matplotlib)."
    except Exception as error:  # errors in matplotlib, its fonts and caches
        words = getattr(error, "strerror", None) or f"{type(error).__name__}: {one_line(str(error), 200)}"
        pictures, why = [], f"No plots: {words}."
        warn(f"cannot draw {folder / PLOTS}: {words}")
    samples, answers = (read_history(path) if (path := folder / name).exists() else [] for name in (SAMPLES, ANSWERS))
    record, fork = (json.loads(path.read_text(encoding="utf-8")) if (path := folder / name).exists() else {}
                    for name in ("run.json", FORK))
    before, after = before_and_after(samples, answers)
    alarms = find(history) + (answered(after) if answers else [])
    return RunSummary(stage, alarms, history, pictures, why, before, after, record, fork)


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


# -- contents ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSummary:
    """Contents of a run's report.

    history: rows of metrics.jsonl. pictures: PNG files; no_pictures: why there are none. before, after: samples, of the
    same prompts if the run has fixed ones. record, fork: contents of run.json and fork.json. state: how far the run
    got, if it failed.
    """

    stage: str
    alarms: list[Alarm]
    history: list[dict]
    pictures: list[Path]
    no_pictures: str
    before: list[dict]
    after: list[dict]
    record: dict
    fork: dict = field(default_factory=dict)
    state: str = ""

    @property
    def header(self) -> list[str]:
        """The run's first lines: data, model, settings, steps."""
        return (self.record.get("facts") or {}).get("header") or []

    @property
    def fork_lines(self) -> list[str]:
        """What the run went on from and with what, and where the rollouts differ first; empty where it began anew."""
        if not self.fork:
            return []
        changed = ", ".join(f"{name} {new} (was {old})" for name, (old, new) in self.fork["changed"].items())
        differs = self.fork.get("differs") or ""
        return [f"Goes on from {self.fork['of']} after step {self.fork['step']}, with {changed}.",
                *([f"{differs[0].upper()}{differs[1:]}."] if differs else [])]

    @property
    def last_step(self) -> dict | None:
        return next((row for row in reversed(self.history) if not _is_evaluation(row)), None)

    @property
    def held_out(self) -> dict | None:
        return next((row for row in reversed(self.history) if _is_evaluation(row)), None)

    @property
    def samples(self) -> list[tuple[str, list[dict]]]:
        """Tables with their titles: one table if both sets of samples answer the same prompts, else one for each."""
        before, after = self.before, self.after
        prompts, again = ([row.get("prompt") for row in rows] for rows in (before, after))
        if not before or prompts != again or None in prompts:
            return [(f"Samples at the {when} (step {rows[0]['step']})",
                     [{"prompt": row.get("prompt"), **_pictured(row), "response": _ended(row),
                       "score": row.get("score")} for row in rows])
                    for when, rows in (("start", before), ("end", after)) if rows]
        both = [(f"step {rows[0]['step']}", rows) for rows in (before, after)]
        if "side" in before[0]:  # a reward model: the same responses, other scores
            return [("The same responses, scored before and after", [
                {"prompt": row["prompt"], **_pictured(row), "response": row["completion"], "was": row.get("side", "")}
                | {f"score, {step}": rows[i].get("score") for step, rows in both} for i, row in enumerate(before)])]
        return [("The same prompts before and after", [
            {"prompt": row["prompt"], **_pictured(row)} | {step: _scored(rows[i]) for step, rows in both}
            for i, row in enumerate(before)])]

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {text}" for name, text in sorted((self.record.get("versions") or {}).items()))


def _pictured(row: dict) -> dict:
    """The files of the images that a sample asks about; empty without images."""
    images = row.get("images")
    return {"images": images} if isinstance(images, list) and images else {}


def _scored(row: dict) -> str:
    """A response with its remarks in a line below, and the judge's text in another."""
    parts = [f"{name} {number(value)}" for name, value in (row.get("scores") or {}).items()]
    notes = ", ".join([*remarks(row), *parts])
    judge = f"\njudge: {row['judge']}" if row.get("judge") else ""
    return f"{row['completion']}" + (f"\n({notes})" if notes else "") + judge


def _ended(row: dict) -> str | None:
    """A response, and whether it is empty or did not end; its score is in another column."""
    return _scored(row | {"score": None}) if "completion" in row else None


def _is_evaluation(row: dict) -> bool:
    return any(name.startswith("eval/") for name in row)


def first_lines(history: list[dict]) -> list[str]:
    """The figures of the first step in one sentence, and what they mean; empty for a stage that does not sample."""
    row = next((r for r in history if r.get("step") == 1 and "completions/clipped_ratio" in r), {})
    if row.get("reward") is None:  # nothing was sampled, or nothing has a finite score
        return []
    signal = _signal(row)
    seconds = f"; the step took {row['time/step']:.3g} s" if "time/step" in row else ""
    listed = "; ".join(f"{name}: {text}" for name, text in figures(signal).items())
    verdicts = [*_of_tools(row), *verdict(signal)]
    return [f"Before the first update, {listed}{seconds}.", *(f"Verdict: {text}." for text in verdicts)]


def _of_tools(row: dict) -> list[str]:
    """Problems with tool calls, whose effects alone the other figures show."""
    calls, failed = row.get("tools/call_frequency"), row.get("tools/failure_frequency", 0.0)
    full = row.get("episodes/no_room_ratio", 0.0)
    problems = []
    if calls is not None and calls < FEW_CALLS:
        problems.append(f"{calls:.0%} of the responses call a tool; begin with SFT on conversations with tool calls")
    if failed > MANY_FAILED:
        problems.append(f"{failed:.0%} of the calls of tools fail; read the answers in samples.jsonl")
    if full > FEW_CALLS:
        problems.append(f"in {full:.0%} of the episodes an answer no longer fits; allow more sampling.max_new_tokens")
    return problems


def _signal(row: dict) -> RewardSignal:
    """A row of metrics.jsonl as a RewardSignal; without the number of prompts and whether all scores were 0 or 1, which
    a row does not have."""
    mean = row["reward"]
    return RewardSignal(
        num_prompts=0, group_size=round(row.get("prompts/num_responses", 1)), mean=mean,
        best=row.get("prompts/best_score", mean), with_spread=row.get("prompts/with_spread", 0.0),
        is_constant=row.get("reward_std", 1.0) <= 1e-9 * abs(mean), is_binary=False,
        ended=1 - row["completions/clipped_ratio"], empty=row.get("completions/empty_ratio", 0.0),
        length=row["completions/mean_length"])


# -- as Markdown -------------------------------------------------------------------------------------------------------


def markdown(run: RunSummary) -> str:
    """The report as Markdown."""
    lines = [f"# Report of stage {run.stage}", "", *([f"**{cell(run.state, 600)}**", ""] if run.state else []),
             *(f"- {cell(line, 400)}" for line in run.header)]
    lines += [""] * bool(run.header) + [f"{cell(line, 600)}\n" for line in run.fork_lines]
    lines += [f"{line}\n" for line in first_lines(run.history)]
    lines += ["## Alarms", "", *alarm_lines(run.alarms), "", "## Curves", ""]
    lines += [f"![{path.stem.replace('_', ' ')}](plots/{path.name})" for path in run.pictures] or [
        run.no_pictures or "Nothing to draw."]
    for title, rows in run.samples:
        cells = [[_markdown_cell(name, value) for name, value in row.items()] for row in rows]
        lines += ["", f"## {title}", "", *table(list(rows[0]), cells)]
    lines += ["", "## Metrics", ""]
    lines += _metrics("the last step", run.last_step) if run.last_step else ["No step was taken."]
    lines += ["", *_metrics("held out", run.held_out)] if run.held_out else []
    if run.record:
        lines += ["", "## Made by", "", f"`{run.record.get('command', '')}`", "", run.versions]
    return "\n".join(lines) + "\n"


def _markdown_cell(name: str, value: object) -> str:
    """A number or text as a cell; of a prompt the end of its last turn."""
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, list):  # files of images, whose names the prompt has
        value = ", ".join(map(os.path.basename, value))
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


# -- as HTML, in light and dark mode -----------------------------------------------------------------------------------


_STYLE = """
:root { color-scheme: light dark; --ink: #1d1c1a; --ground: #fbfaf8; --line: #d9d5cf; --quiet: #5c5955;
        --alarm: #9c1f1f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ecebe8; --ground: #171819; --line: #3a3c3f; --quiet: #b0ada8; --alarm: #ff9d94; }
  .plots img { filter: invert(0.9) hue-rotate(180deg); }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--ground); color: var(--ink);
       font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; border-top: 1px solid var(--line); padding-top: 1rem; }
h3 { font-size: 1rem; color: var(--quiet); }
table { border-collapse: collapse; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.said { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 34rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
.plots img { width: 100%; border-radius: .4rem; }
td.pictures img { max-width: 6rem; max-height: 6rem; margin-right: .3rem; border-radius: .2rem; }
.alarm { color: var(--alarm); } .quiet { color: var(--quiet); } code { overflow-wrap: anywhere; }
"""


def html(title: str, runs: list[RunSummary], table: list[dict] | None = None,
         answers: list[dict] | None = None) -> str:
    """The page. table: rows of each stage's results, shown first; answers: the same prompts to every model."""
    is_one = len(runs) == 1 and not table and not answers  # then its stage is the title
    parts = [] if is_one else [f"<h1>{escape(title)}</h1>"]
    if table:
        parts.append(_html_table(table))
    if answers:
        parts.append(f"<h2>The same prompts</h2>{_html_table(answers)}")
    if len(runs) > 1:
        links = " &middot; ".join(f'<a href="#{escape(c.stage)}">{escape(c.stage)}</a>' for c in runs)
        parts.append(f"<nav>{links}</nav>")
    parts += [_section(run, 'h1' if is_one else 'h2') for run in runs]
    return ('<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
            f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n")


def _section(run: RunSummary, heading: str) -> str:
    parts = [f'<section id="{escape(run.stage)}"><{heading}>Stage {escape(run.stage)}</{heading}>']
    taken = run.last_step["step"] if run.last_step else 0
    steps = f"{taken} step{'s' * (taken != 1)}"
    steps += f" in {duration(run.record['seconds'])}" if run.record.get("seconds") else ""
    parts += [f'<p class="alarm"><strong>{escape(run.state)}</strong></p>'] if run.state else []
    parts.append(f'<p class="quiet">{"<br>".join(map(escape, [*run.header, steps]))}</p>')
    parts += [f"<p>{escape(line)}</p>" for line in (*run.fork_lines, *first_lines(run.history))]
    parts += [f'<p class="alarm"><strong>{escape(a.name)}</strong>: {escape(a.text)}</p>' for a in run.alarms] or [
        '<p class="quiet">None of the alarms went off.</p>']
    parts.append(f'<p>{escape(run.no_pictures)}</p>' if run.no_pictures else
                 f'<div class="plots">{"".join(map(_image, run.pictures))}</div>')
    for title, rows in run.samples:
        parts.append(f"<h3>{escape(title)}</h3>" + _html_table(rows))
    for title, row in (("Last step", run.last_step), ("Held out", run.held_out)):
        if row:
            values = [{"metric": name.removeprefix("eval/"), "value": shown(name, value), "meaning": meaning(name)}
                      for name, value in sorted(row.items())]
            parts.append(f"<details><summary>{title}: all metrics</summary>{_html_table(values)}</details>")
    parts.append(f"<p><code>{escape(run.record.get('command', ''))}</code></p>"
                 f'<p class="quiet">{escape(run.versions)}</p></section>')
    return "".join(parts)


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem.replace("_", " "))}" src="data:image/png;base64,{data}">'


def _html_table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_html_cell(row.get(name), name) for name in names)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_cell(value: object, name: str) -> str:
    if name == "prompt" and (turn := last_turn(str(value or ""))) != value:
        return f'<td class="said"><details><summary>{escape(turn)}</summary>{escape(str(value or ""))}</details></td>'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number">{number(value)}</td>'
    if name == "images":
        return f'<td class="pictures">{pictures(value or [])}</td>'
    return f'<td class="said">{escape("" if value is None else str(value))}</td>'


def pictures(paths: Sequence[object]) -> str:
    """Images of files as HTML (`thumbnails`)."""
    return "".join(f'<img alt="{escape(name)}" title="{escape(name)}" src="{url}">' if url else
                   f'<span class="quiet">{escape(name)}</span> ' for name, url in thumbnails(paths))
