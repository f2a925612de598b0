"""The terminal: a progress bar and a table that stays when a person watches, plain lines when nobody does."""

from __future__ import annotations

import sys
import time

from hybrid_rlhf.distributed import is_main


class Progress:
    """Progress of one stage on stderr. keys: metric names that get a column."""

    def __init__(self, stage: str, keys: tuple[str, ...], total: int, max_seconds: float | None = None) -> None:
        from rich.console import Console

        self.stage, self.keys, self.total, self.max_seconds = stage, keys, total, max_seconds
        self.console = Console(stderr=True, highlight=False)
        self.is_live = self.console.is_terminal and is_main()
        self._bar = None
        self._started = time.perf_counter()

    def __enter__(self) -> Progress:
        if self.is_live:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True),
                            TextColumn("{task.fields[now]}", style="cyan"), console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.stage, total=None if self.max_seconds else self.total, now="")
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, step: int, values: dict[str, float], is_shown: bool) -> None:
        """One step is done; with is_shown its line stays on the terminal."""
        if not is_main():
            return
        now = "  ".join(f"{short(k)} {values[k]:.4g}" for k in self.keys if k in values)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, now=now)
        if is_shown:
            self.note(f"step {step}/{self.total}  {now}  {self._left(step)}" if self._bar is None else
                      f"step {step:>5}  {now}")

    def note(self, text: str) -> None:
        """A line that stays."""
        if is_main():
            self.console.print(f"  {self.stage}: {text}" if self._bar is None else f"  {text}", markup=False,
                               soft_wrap=True)

    def _left(self, step: int) -> str:
        passed = time.perf_counter() - self._started
        if self.max_seconds:
            return f"{max(0.0, self.max_seconds - passed):.0f} s left"
        return f"{passed / step * (self.total - step):.0f} s left"


def short(name: str) -> str:
    """A metric's last part, enough where a line names its stage."""
    return name.rsplit("/", 1)[-1]


def summary_table(rows: list[dict], title: str) -> None:
    """Print rows (dicts of the same columns; numbers with three decimals) as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(k for row in rows for k in row))
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name.replace("_", " "), justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(c)) for c in columns))
    width = None if sys.stdout.isatty() else 120
    Console(width=width, highlight=False).print(table)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
