"""Render the report as one self-contained HTML file with embedded pictures, in light and dark mode."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from hybrid_rlhf.report.metric_names import meaning, shown
from hybrid_rlhf.report.run_summary import RunSummary
from hybrid_rlhf.report.terminal import duration, last_turn, number

_STYLE = """
:root { color-scheme: light dark; --ink: #1d1c1a; --ground: #fbfaf8; --line: #d9d5cf; --quiet: #5c5955;
        --alarm: #9c1f1f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ecebe8; --ground: #171819; --line: #3a3c3f; --quiet: #b0ada8; --alarm: #ff9d94; }
  img { filter: invert(0.9) hue-rotate(180deg); }
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
.alarm { color: var(--alarm); } .quiet { color: var(--quiet); } code { overflow-wrap: anywhere; }
"""


def html(title: str, runs: list[RunSummary], table: list[dict] | None = None,
         answers: list[dict] | None = None) -> str:
    """The page. table: rows of each stage's results, shown first; answers: the same prompts to every model."""
    is_one = len(runs) == 1 and not table and not answers  # then its stage is the title
    parts = [] if is_one else [f"<h1>{escape(title)}</h1>"]
    if table:
        parts.append(_table(table))
    if answers:
        parts.append(f"<h2>The same prompts</h2>{_table(answers)}")
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
    parts += [f"<p>{escape(line)}</p>" for line in run.first_step]
    parts += [f'<p class="alarm"><strong>{escape(a.name)}</strong>: {escape(a.text)}</p>' for a in run.alarms] or [
        '<p class="quiet">None of the alarms went off.</p>']
    parts.append(f'<p>{escape(run.no_pictures)}</p>' if run.no_pictures else
                 f'<div class="plots">{"".join(map(_image, run.pictures))}</div>')
    for title, rows in run.samples:
        parts.append(f"<h3>{escape(title)}</h3>" + _table(rows))
    for title, row in (("Last step", run.last_step), ("Held out", run.held_out)):
        if row:
            values = [{"metric": name.removeprefix("eval/"), "value": shown(name, value), "meaning": meaning(name)}
                      for name, value in sorted(row.items())]
            parts.append(f"<details><summary>{title}: all metrics</summary>{_table(values)}</details>")
    parts.append(f"<p><code>{escape(run.record.get('command', ''))}</code></p>"
                 f'<p class="quiet">{escape(run.versions)}</p></section>')
    return "".join(parts)


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem.replace("_", " "))}" src="data:image/png;base64,{data}">'


def _table(rows: list[dict]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_value(row.get(name), name) for name in names)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _value(value: object, name: str) -> str:
    if name == "prompt" and (turn := last_turn(str(value or ""))) != value:
        return f'<td class="said"><details><summary>{escape(turn)}</summary>{escape(str(value or ""))}</details></td>'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'<td class="number">{number(value)}</td>'
    return f'<td class="said">{escape("" if value is None else str(value))}</td>'
