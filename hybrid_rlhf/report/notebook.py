"""A run's progress in a Jupyter notebook: one output of the cell, which is updated in place.

IPython is not imported: in a notebook's kernel it is loaded already.
"""

from __future__ import annotations

import base64
import html
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from pathlib import Path

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.distributed import is_main
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.report.metric_names import meaning
from hybrid_rlhf.report.pace import Pace
from hybrid_rlhf.report.summary import pictures
from hybrid_rlhf.report.terminal import (
    NUM_SAMPLES,
    Progress,
    cells,
    memory_by_role,
    number,
    sample_lines,
    short,
    summary_line,
    time_shares,
    times,
)

EVERY, AT_LEAST_EVERY = 0.5, 5.0  # seconds between two updates; the second where nothing but the clock changed
NUM_LIVE, NUM_AT_END, NUM_COLUMNS, NUM_NOTES = 8, 12, 8, 20  # rows while it runs and afterwards; columns; lines
NUM_CURVES, _WIDTH = 6, 96  # curves shown without a click; characters of a sample's line
_FAINT, _ALARM = "opacity:.75", "color:var(--vscode-errorForeground,var(--jp-error-color1,#b3261e));font-weight:600"
_CELL = "text-align:right;padding:.15em .8em"


def display(stage: str, keys: tuple[str, ...], total: int, max_seconds: float | None = None) -> Progress | CellProgress:
    """The progress display of a stage: an output of a notebook's cell, or the terminal."""
    ipython = shell()
    if ipython is None or not is_main():
        return Progress(stage, keys, total, max_seconds)
    return CellProgress(ipython, stage, keys, total, max_seconds)


def shell() -> object | None:
    """IPython's shell where this process is the kernel of a notebook; None elsewhere, in a terminal's IPython too."""
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    ipython = ask() if ask is not None else None
    return ipython if getattr(ipython, "kernel", None) is not None else None


@contextmanager
def stderr_in_cell() -> Iterator[None]:
    """Redirect stderr to stdout within the block in a notebook, whose cells show stderr in red."""
    if shell() is None:
        yield
        return
    with redirect_stderr(sys.stdout):
        yield


class CellProgress:
    """As terminal.Progress, in the running cell: the last logged steps as a table, the current activity below it, and
    at the end steps from all of the run, and its curves. A thread updates it, at most twice a second."""

    is_live = True

    def __init__(self, ipython: object, stage: str, keys: tuple[str, ...], total: int,
                 max_seconds: float | None = None) -> None:
        self.stage, self.keys, self.total, self.pace = stage, keys, total, Pace(total, max_seconds)
        self._output = _Output(ipython)
        self._columns: tuple[str, ...] = ()
        self._rows: list[tuple[str, list[str]]] = []  # the logged steps and the held-out rows, as shown
        self._step, self._values, self._samples, self._doing = 0, {}, [], ""
        self._notes: list[tuple[str, str]] = []  # style and text
        self._pictures: list[Path] = []
        self._is_new, self._is_over = True, threading.Event()
        self._hearing, self._thread = ExitStack(), threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CellProgress:
        self.pace.begin()
        self._hearing.enter_context(activity.listening(self._hear))
        if not self._output.is_kept:
            self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._hearing.close()
        self._is_over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._output.write(*self._page())
        if self._pictures:
            with suppress(OSError):  # the files may be gone; the report has them
                _Output(self._output.ipython).write(curves(self._pictures), f"curves: {self._pictures[0].parent}")

    def step(self, step: int, values: dict[str, float], *, is_logged: bool, samples: list[dict]) -> None:
        """Show that `step` is done; a logged one is a row of the table."""
        self.pace.mark(step)
        self._samples = samples or self._samples
        if is_logged:
            self._columns = self._columns or tuple(k for k in self.keys if k in values)[:NUM_COLUMNS]
            self._rows.append((str(step), cells(self._columns, values)))
        self._step, self._values, self._doing, self._is_new = step, values, "", True

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Show the held-out metrics after `step`: as a row, or a line where none has a column."""
        named = {k.removeprefix("eval/"): v for k, v in values.items()}
        if any(k in named for k in self._columns):
            self._rows.append(("held out", cells(self._columns, named)))
        else:
            listed = "  ".join(f"{k} {number(v)}" for k, v in list(named.items())[:6])
            self.print_line(f"held out after step {step}: {listed}")
        self._is_new = True

    def print_line(self, text: str, style: str = "") -> None:
        """Show a line soon; may be called by a signal handler, so it does not block. style: "" for a plain one."""
        self._notes.append((_ALARM if style else "", text))
        self._is_new = True

    announce = print_line

    def pictures(self, paths: Sequence[Path]) -> None:
        """Keep the run's curves, which are shown at its end."""
        self._pictures = list(paths)

    def _hear(self, text: str) -> None:
        self._doing, self._is_new = text, True

    def _watch(self) -> None:
        written = 0.0
        while not self._is_over.wait(EVERY):
            if self._is_new or time.perf_counter() - written >= AT_LEAST_EVERY:
                self._is_new, written = False, time.perf_counter()
                self._output.write(*self._page())

    def _page(self) -> tuple[str, str]:
        """The current output, as HTML and as plain text."""
        rows = spread(self._rows, NUM_AT_END) if self._is_over.is_set() else self._rows[-NUM_LIVE:]
        current = str(self._step)
        if not self._is_over.is_set() and self._columns and not any(name == current for name, _ in rows):
            rows = [*rows, (current, cells(self._columns, self._values))]
        lines = [line for sample in self._samples[:NUM_SAMPLES] for line in sample_lines(sample, _WIDTH)]
        images = [path for sample in self._samples[:NUM_SAMPLES] for path in sample.get("images", ())]
        more = len(self._notes) - NUM_NOTES
        notes = [*([("", f"({more} earlier lines are left out)")] if more > 0 else []), *self._notes[-NUM_NOTES:]]
        is_over = self._is_over.is_set()
        figures = [] if is_over else [(_FAINT, text) for text in (
            time_shares(self._values), memory_by_role(self._values)) if text]
        name = "" if is_over else f"{self.stage} "
        shown = _lines(lines) + pictures(images)
        return (f"<div>{self._bar()}{self._table(rows)}{shown}{_notes(figures)}{_notes(notes)}</div>",
                "\n".join([name + self._status(), *self._text_rows(rows), *(text for _, text in notes)]))

    def _status(self) -> str:
        """The line with the time; after the run it begins with the stage's name."""
        if self._is_over.is_set():
            return summary_line(self.stage, self.pace.first, self._step, self.pace.passed)
        doing = f"; {self._doing}" if self._doing else ""
        return f"{self._step}/{self.total}, {times(self.pace)}{doing}"

    def _bar(self) -> str:
        if self._is_over.is_set():
            return f"<div>{_safe(self._status())}</div>"
        return (f'<div><b>{_safe(self.stage)}</b> <progress style="vertical-align:middle" max="1" '
                f'value="{self.pace.share(self._step):.3f}"></progress> {_safe(self._status())}</div>')

    def _table(self, rows: Sequence[tuple[str, list[str]]]) -> str:
        if not rows:
            return ""
        heads = "".join(f'<th style="{_CELL}" title="{_safe(meaning(k))}">{_safe(short(k))}</th>'
                        for k in self._columns)
        body = "".join(
            f'<tr style="{"font-weight:600" if name == "held out" else ""}">'
            + "".join(f'<td style="{_CELL}">{_safe(cell)}</td>' for cell in (name, *row)) + "</tr>"
            for name, row in rows)
        return (f'<table style="font-variant-numeric:tabular-nums;margin:.5em 0"><thead><tr>'
                f'<th style="{_CELL}">step</th>{heads}</tr></thead><tbody>{body}</tbody></table>')

    def _text_rows(self, rows: Sequence[tuple[str, list[str]]]) -> list[str]:
        lines = [("step", [short(k) for k in self._columns]), *rows] if rows else []
        widths = [max(len(row[i]) for _, row in lines) for i in range(len(self._columns))]
        return ["  ".join([name.rjust(8), *(c.rjust(w) for c, w in zip(row, widths, strict=True))])
                for name, row in lines]


class _Output:
    """One output of the running cell. is_kept: %%capture keeps every version, so it gets the last one only."""

    def __init__(self, ipython: object) -> None:
        self.ipython, self._name = ipython, os.urandom(16).hex()
        self._is_there = False

    @property
    def is_kept(self) -> bool:
        return hasattr(self.ipython.display_pub, "outputs")

    def write(self, page: str, text: str) -> None:
        """Create the output, or replace it. Errors of a closed notebook do not end the run."""
        with suppress(Exception):
            self.ipython.display_pub.publish({"text/html": page, "text/plain": text}, {},
                                             transient={"display_id": self._name}, update=self._is_there)
            self._is_there = True


def spread(rows: list[tuple[str, list[str]]], most: int) -> list[tuple[str, list[str]]]:
    """At most `most` rows, spread over the run from the first to the last, and of the held-out rows the last."""
    held_out = [i for i, (name, _) in enumerate(rows) if name == "held out"][-1:]
    steps = [i for i, (name, _) in enumerate(rows) if name != "held out"]
    room = max(2, most - len(held_out))
    if len(steps) > room:
        steps = [steps[round(i * (len(steps) - 1) / (room - 1))] for i in range(room)]
    return [rows[i] for i in sorted([*steps, *held_out])]


def curves(paths: Sequence[Path]) -> str:
    """The pictures side by side, embedded as data: a notebook may be opened on another machine."""
    shown = [f'<img style="width:19em;background:#fff" alt="{_safe(path.stem.replace("_", " "))}" '
             f'src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">' for path in paths]
    row = '<div style="display:flex;flex-wrap:wrap;gap:.5em;margin:.5em 0">{}</div>'
    rest = shown[NUM_CURVES:]
    more = f"<details><summary>{len(rest)} more curves</summary>{row.format(''.join(rest))}</details>" if rest else ""
    return row.format("".join(shown[:NUM_CURVES])) + more


def _safe(text: str) -> str:
    return html.escape(escape_control(text))


def _lines(lines: Sequence[str]) -> str:
    style = "margin:.5em 0;font:.9em monospace;white-space:pre;overflow-x:auto"
    return f'<pre style="{style}">{_safe(chr(10).join(lines))}</pre>' if lines else ""


def _notes(notes: Sequence[tuple[str, str]]) -> str:
    return "".join(f'<div style="{style}">{_safe(text)}</div>' for style, text in notes)
