"""Prints the predicted seconds of a step as a table, with a line that explains them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from hybrid_rlhf.memory_plan.step_time import StepTime


def show_times(rows: Sequence[tuple[str, StepTime]], source: str, stream: TextIO) -> None:
    """rows: (settings, their time), all of the same phases. source: where the rates come from, for the line below."""
    phases = [p for p in rows[0][1].phases if any(time.phases.get(p) for _, time in rows)]
    per = "hours a run" if rows[0][1].steps else "hours/1000 steps"
    cells = [["device", "settings", *phases, "a step", "tokens/s", per]]
    for settings, time in rows:
        hours = time.whole * (time.steps or 1000) / 3600
        cells.append([time.device, settings, *(seconds_text(time.phases.get(p, 0.0)) for p in phases),
                      seconds_text(time.whole), number_text(time.tokens / time.whole), number_text(hours)])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))),
              file=stream)
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
