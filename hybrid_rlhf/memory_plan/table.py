"""The memory plan as a table: rich on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from hybrid_rlhf.memory_plan.amounts import size_text
from hybrid_rlhf.memory_plan.plan import Plan
from hybrid_rlhf.memory_plan.search import Change
from hybrid_rlhf.memory_plan.step_time import StepTime


def show(plan: Plan, advice: Iterable[str] = (), stream: TextIO | None = None) -> None:
    """Print the table, the available memory, and the verdict. advice: flags that would make it fit, if it does not."""
    stream = stream or sys.stdout
    rows = [[line.role, line.kind, *(size_text(line.phases[p]) if line.phases.get(p) else "" for p in plan.phases)]
            for line in plan.lines]
    total = ["total", "", *(size_text(plan.total(p)) for p in plan.phases)]
    head = ["role", "bytes of", *plan.phases]
    if stream.isatty():
        _rich(plan, head, rows, total, stream)
    else:
        print(plan.title, file=stream)
        _plain([head, *rows, total], 2, stream)
    if plan.host:
        print(f"kept in the CPU's memory for each process: {size_text(plan.host)}", file=stream)
    for note in plan.notes:
        print(note, file=stream)
    print(verdict(plan, advice), file=stream)


def verdict(plan: Plan, advice: Iterable[str] = ()) -> str:
    """One line: 'fits', or by how much it is short and what would help."""
    need = f"needs {size_text(plan.peak)} at most ({plan.peak_phase})"
    if plan.available is None:
        return f"{need}; the free memory of this device is unknown"
    there = f"of {size_text(plan.available)}"
    if plan.short <= 0:
        return f"fits: {need} {there}"
    flags, adapters = " ".join(advice), any(role.model.lora.r for role in plan.roles)
    return f"short by {size_text(plan.short)}: {need} {there}; " + (
        f"try {flags}" if flags else "no setting of micro-batches, checkpointing, offload and quantisation that was "
                                     "tried makes it fit: " + "adapters (--model.lora.r 16), " * (not adapters) +
                                     "shorter lengths, more processes (engine.zero_stage 3) or a smaller model would")


def show_changes(changes: Sequence[Change], stream: TextIO) -> None:
    """Print the changed settings, their values, and why."""
    if changes:
        _plain([("setting", "given", "chosen", "why"), *((c.option, c.before, c.chosen, c.why) for c in changes)], 4,
               stream)


def _rich(plan: Plan, head: list[str], rows: list[list[str]], total: list[str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=plan.title, title_justify="left")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(*row, end_section=i + 1 == len(rows) or rows[i + 1][0] != row[0])
    table.add_row(*total, style="bold")
    Console(file=stream).print(table)


def _plain(rows: Sequence[Sequence[str]], num_left: int, stream: TextIO) -> None:
    """Print rows of cells; the first `num_left` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.ljust(w) if i < num_left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip(), file=stream)


# -- Prints the predicted seconds of a step as a table, with a line that explains them ---------------------------------


def show_times(rows: Sequence[tuple[str, StepTime]], source: str, stream: TextIO) -> None:
    """rows: (settings, their time), all of the same phases. source: where the rates come from, for the line below."""
    phases = [p for p in rows[0][1].phases if any(time.phases.get(p) for _, time in rows)]
    per = "hours a run" if rows[0][1].steps else "hours/1000 steps"
    cells = [["device", "settings", *phases, "a step", "tokens/s", per]]
    for settings, time in rows:
        hours = time.whole * (time.steps or 1000) / 3600
        cells.append([time.device, settings, *(seconds_text(time.phases.get(p, 0.0)) for p in phases),
                      seconds_text(time.whole), number_text(time.tokens / time.whole), number_text(hours)])
    _plain(cells, 2, stream)
    first = rows[0][1]
    print(f"seconds, predicted and not measured: {source}; a step of {first.sequences}, {first.lengths}"
          + (f"; a run of {first.steps} steps" if first.steps else ""), file=stream)
    print(f"most of a step is {first.longest}: {first.phases[first.longest] / first.whole:.0%}"
          + (f" on {first.device}" if len({time.device for _, time in rows}) > 1 else ""), file=stream)


def seconds_text(value: float) -> str:
    """Three digits: '12.3 s', '45.1 ms'."""
    return f"{number_text(value)} s" if value >= 0.1 else f"{number_text(1000 * value)} ms"


def number_text(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"
