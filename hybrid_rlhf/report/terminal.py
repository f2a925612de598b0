"""Progress on stderr: a live table with a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hybrid_rlhf.core import activity
from hybrid_rlhf.core.distributed import device, is_main
from hybrid_rlhf.core.errors import escape_control
from hybrid_rlhf.report.pace import Pace

_STEP, _COLUMN = 8, 11  # minimum widths of the table's first and other columns
NUM_SAMPLES = 2  # in the live view
# Markers of published chat templates, and the speakers of transcripts: <|im_end|>, </s>, <start_of_turn>, [/INST].
_MARKER = re.compile(r"<\|[^|<>]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]|"
                     r"\n\n(?=(?:Human|Assistant): ?)")
_AROUND_IMAGE = re.compile(r"<\|vision_(?:start|end)\|>")  # Qwen's, within a turn
_ROLE = re.compile(r"\s*(user|human|assistant|model|system|tool) *(?::|\n|$)", re.IGNORECASE)
PHASES = ("generate", "score", "train", "switch")
SECONDS = 10.0  # between lines of a ProgressLine
SILENCE = 30.0  # seconds at most between two lines where stderr is not a terminal


class ProgressLine:
    """Progress of a long task that is not a run: a plain line on stderr now and then. begin: the first word of each."""

    def __init__(self, begin: str) -> None:
        self.begin, self._last = begin, time.monotonic()

    def update(self, text: str) -> None:
        """Print how far the task is, at most every SECONDS."""
        if time.monotonic() - self._last >= SECONDS:
            print(f"{self.begin}: {text}", file=sys.stderr, flush=True)
            self._last = time.monotonic()


class Progress:
    """Progress of one stage. keys: metric names that get a column; total: steps; max_seconds: limit of time, if any.

    Logged steps stay on the terminal as rows of one table; the live part below shows the current step, the newest
    samples, where the step's time went, memory by role, and a bar with the time left. If stderr is not a terminal,
    every logged step is one plain line, and so is the first step of this process; a thread prints the current activity
    where SILENCE seconds would pass without a line, or a phase beside the steps takes more than a moment.
    """

    def __init__(self, stage: str, keys: tuple[str, ...], total: int, max_seconds: float | None = None) -> None:
        from rich.console import Console

        self.stage, self.keys, self.total, self.pace = stage, keys, total, Pace(total, max_seconds)
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.is_live = is_main() and self.console.is_terminal and not self.console.is_dumb_terminal
        self._live, self._step, self._values, self._samples = None, 0, {}, []
        self._doing, self._shown = "", 0  # _shown: the step of the table's last row
        self._columns: tuple[str, ...] = ()
        self._notice, self._hearing = "", ExitStack()
        self._printed, self._is_over = time.perf_counter(), threading.Event()

    def __enter__(self) -> Progress:
        self.pace.begin()
        if self.is_live:
            from rich.live import Live

            # rich would redirect what other code prints to stdout to this console, that is to stderr, even into a pipe
            self._live = Live(console=self.console, get_renderable=self._frame, refresh_per_second=4, transient=True,
                              redirect_stdout=sys.stdout.isatty())
            self._live.start()
        elif is_main():
            threading.Thread(target=self._tick, daemon=True).start()
        self._hearing.enter_context(activity.listening(self._hear))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._hearing.close()
        self._is_over.set()
        if self._live is not None:
            self._live.stop()
        if self._step > self.pace.first:
            self.print_line(summary_line(self.stage, self.pace.first, self._step, self.pace.passed))

    def step(self, step: int, values: dict[str, float], *, is_logged: bool, samples: list[dict] = ()) -> None:
        """Show that `step` is done; a logged one stays on the terminal."""
        self._step, self._values, self._doing = step, values, ""
        self.pace.mark(step)
        self._samples = samples or self._samples
        is_printed = is_logged or step == self.pace.first + 1 or time.perf_counter() - self._printed >= SILENCE
        if not is_main() or not is_printed:
            return
        if self._live is None:
            now = "  ".join(f"{short(k)} {metric(k, values[k])}" for k in self.keys if k in values)
            self.print_line(f"{self.stage} {step}/{self.total}  {now}{time_left(self.pace, '  ')}")
            return
        if not self._columns:
            self._columns = fitting(tuple(k for k in self.keys if k in values), self.console.width)
            self.print_line(self._row("step", [short(k) for k in self._columns]), style="bold")
        self.print_line(self._cells(step, values))
        self._shown = step

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Print the held-out metrics after `step`: a row of the table, or one line."""
        named = {k.removeprefix("eval/"): v for k, v in values.items()}
        if any(k in named for k in self._columns):
            self.print_line(self._cells("held out", named), style="green")
            return
        first = [k for k in self.keys if k in named]
        taken = {short(k) for k in first}  # kl and objective/kl would both be named kl
        order = (first + [k for k in named if k not in first and short(k) not in taken])[:6]
        self.print_line(f"{self.stage} {step}/{self.total}  held out: "
                    + "  ".join(f"{name} {metric(k, named[k])}" for k, name in _names(order).items()), style="green")

    def announce(self, text: str) -> None:
        """Print a line at once; may be called by a signal handler, so it never waits for the console."""
        if self._live is None:
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"{text}\n".encode())  # not print: its buffer is not reentrant
        self._notice = text

    def pictures(self, paths: Sequence[Path]) -> None:
        """Does nothing: a terminal shows no curves."""

    def _hear(self, text: str) -> None:
        self._doing = text

    def _expected(self) -> str:
        """The current phase's seconds, where they are known from work of its kind and are not over already."""
        seconds = self.pace.phase_seconds(self.pace.phase)
        is_guess = seconds is None or seconds == self.pace.forecast.guesses.get(self.pace.phase)
        return "" if is_guess or seconds <= self.pace.phase_age else f", about {roughly(seconds)}"

    def _tick(self) -> None:
        """Print plain lines about the current activity where no other line came for a while."""
        while not self._is_over.wait(0.5):
            quiet, phase = time.perf_counter() - self._printed, self.pace.phase
            is_new = bool(phase) and activity.SLOW <= self.pace.phase_age <= quiet
            if (phase or self._doing) and (is_new or quiet >= SILENCE):
                print(f"{self.stage} {self._step}/{self.total}  {phase or self._doing}{self._expected() * is_new}; "
                      f"{times(self.pace)}", file=sys.stderr, flush=True)
                self._printed = time.perf_counter()  # print, not rich: rich may draw from the run's random numbers

    def print_line(self, text: str, style: str = "") -> None:
        """Print a line that stays. style: rich's."""
        from rich.text import Text

        if is_main():
            self._printed = time.perf_counter()
            self.console.print(Text(text, style=style), soft_wrap=self._live is None)

    def _row(self, first: str, cells: list[str]) -> str:
        widths = [max(_COLUMN, len(short(k))) for k in self._columns]
        return first.rjust(_STEP) + "".join(f" {c:>{w}}" for c, w in zip(cells, widths, strict=True))

    def _cells(self, first: object, values: dict[str, float]) -> str:
        return self._row(str(first), cells(self._columns, values))

    def _frame(self):  # noqa: ANN202 - a rich renderable
        """The live part below the table."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        is_new = self._columns and self._step > self._shown
        lines: list = [Text(self._cells(self._step, self._values), style="dim", no_wrap=True)] if is_new else []
        width = self.console.width
        for sample in self._samples[:NUM_SAMPLES]:
            lines += [Text(line, style="cyan", no_wrap=True) for line in sample_lines(sample, width - 1)]
        lines += [Text(line, no_wrap=True, overflow="ellipsis") for line in (
            time_shares(self._values), memory_by_role(self._values)) if line]
        bar = Table.grid(padding=(0, 1))
        share = self.pace.share(self._step)
        bar.add_row(Text(self.stage, style="bold"), ProgressBar(total=1.0, completed=share, width=max(8, width // 4)),
                    Text(f"{self._step}/{self.total}", no_wrap=True),
                    Text(times(self.pace), no_wrap=True))
        lines += [bar, *([Text(self._doing, style="dim")] if self._doing else [])]
        return Group(*lines, *([Text(self._notice, style="yellow")] if self._notice else []))


def cells(keys: Sequence[str], values: dict[str, float]) -> list[str]:
    """The values of these metrics, as shown; "" for a missing one."""
    return [metric(k, values[k]) if k in values else "" for k in keys]


def times(pace: Pace) -> str:
    """How long a run has taken, and will take: '1:05 passed, 40 s left'."""
    return f"{duration(pace.passed)} passed{time_left(pace, ', ')}"


def time_left(pace: Pace, before: str) -> str:
    seconds = pace.seconds_left()
    return f"{before}{duration(seconds)} left" if 0.5 <= seconds < float("inf") else ""


def summary_line(stage: str, first: int, step: int, seconds: float) -> str:
    """The last line of a run: 'ppo: 40 steps after 20 in 1:05, 512 MiB of memory at most'."""
    count, before = step - first, f" after {first}" if first else ""
    return (f"{stage}: {count} step{'s' * (count != 1)}{before} in {duration(seconds)}, {memory(peak_bytes())} of "
            "memory at most")


def fitting(keys: tuple[str, ...], width: int) -> tuple[str, ...]:
    """The first of `keys`, as many as fit into a terminal of `width` columns."""
    used, kept = _STEP, []
    for key in keys:
        used += 1 + max(_COLUMN, len(short(key)))
        if used >= width:
            break
        kept.append(key)
    return tuple(kept)


def time_shares(values: dict[str, float]) -> str:
    """Where the time of a step went, and how fast it generated: '12300 tokens/s; of 0.86 s: train 71%, score 19%'."""
    step = values.get("time/step")
    parts = {short(k): v for k, v in values.items() if k.startswith("time/") and short(k) in PHASES and v}
    speed = values.get("engine/tokens_per_second")
    texts = [f"{speed:.0f} tokens/s"] if speed else []
    if step and parts:
        shares = sorted(parts.items(), key=lambda part: -part[1])
        texts.append(f"of {number(step)} s: " + ", ".join(f"{name} {v / step:.0%}" for name, v in shares))
    return "; ".join(texts)


def memory_by_role(values: dict[str, float]) -> str:
    """The most memory that each role took in any phase of the step: 'memory: actor 300 MiB (train), ...'. On a CPU one
    figure, of the whole process."""
    sizes = [value for name, value in values.items() if name.startswith("memory/") and name.count("/") == 2]
    if device().type == "cpu":
        return f"memory: {memory(max(sizes))}" if sizes else ""
    most: dict[str, tuple[float, str]] = {}
    for name, value in values.items():
        if name.startswith("memory/") and name.count("/") == 2:
            _, role, phase = name.split("/")
            most[role] = max(most.get(role, (0.0, "")), (value, phase))
    return "memory: " + ", ".join(f"{role} {memory(size)} ({phase})" for role, (size, phase) in most.items()) \
        if most else ""


def sample_lines(sample: dict, width: int) -> list[str]:
    """A sample on two lines of at most `width` columns: the end of the prompt, where the question is, and the beginning
    of the response, with its score and whether it is empty or did not end by itself."""
    lines = [last_line(f"{'prompt':>10}: ", last_turn(sample["prompt"]), width)] if "prompt" in sample else []
    if "completion" in sample:
        notes = "".join(f"  ({note})" for note in remarks(sample))
        lines.append(one_line(f"{'completion':>10}: {sample['completion']}", width - len(notes)) + notes)
    return lines


def remarks(sample: dict) -> list[str]:
    """Remarks on a response: score 1.25, empty, did not end."""
    score = sample.get("score")
    notes = [f"score {number(score)}"] if isinstance(score, (int, float)) else []
    notes += ["empty"] if not str(sample.get("completion", "")).strip() else []
    return notes + (["did not end"] if sample.get("ended") is False else [])


def one_line(text: str, width: int) -> str:
    """`text` on one line of at most `width` columns, white space as single spaces, control characters escaped."""
    from rich.cells import cell_len, set_cell_size

    indent = text[: len(text) - len(text.lstrip(" "))]
    text = escape_control(indent + " ".join(text.split()))
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"


def last_turn(prompt: str) -> str:
    """The text of the last turn that is not empty, without markers and role; a prompt without turns as it is."""
    prompt = _AROUND_IMAGE.sub("", prompt)
    for part in reversed(_MARKER.split(prompt)):
        role = _ROLE.match(part)
        if text := part[role.end() if role else 0:].strip():
            return text if _MARKER.search(prompt) else prompt
    return prompt


def last_line(label: str, text: str, width: int) -> str:
    """As one_line, after `label`; of a text that is too long the end is shown."""
    from rich.cells import cell_len

    text = one_line(text.strip(), 1 << 30)
    if cell_len(label + text) <= width:
        return label + text
    while cell_len(label + text) >= width:
        text = text[max(1, (cell_len(label + text) - width) // 2):]
    return f"{label}…{text}"


def _names(metrics: Sequence[str]) -> dict[str, str]:
    """Metric -> its name in a line: its last part, or all of it where two have the same last part."""
    last = Counter(map(short, metrics))
    return {name: short(name) if last[short(name)] == 1 and short(name) not in ("mean", "std") else name
            for name in metrics}


def short(name: str) -> str:
    """A metric's last part."""
    return name.rsplit("/", 1)[-1]


def metric(name: str, value: float) -> str:
    """A metric's value; a KL below zero, which is estimation noise, is marked as such."""
    if short(name) != "kl" or value >= 0:
        return number(value)
    return "about 0" if value > -0.05 else f"{number(value)} (noise)"


def number(value: float) -> str:
    """Four significant digits; integers in full."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """7 s, 1:05, 2:00:09; "?" for nan and infinity."""
    if seconds != seconds or seconds == float("inf"):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


def roughly(seconds: float) -> str:
    """An estimated time: 40 s, 14 minutes, 2 h 5 min."""
    minutes = round(seconds / 60)
    if seconds < 100 or minutes < 90:
        return f"{round(seconds)} s" if seconds < 100 else f"{minutes} minutes"
    return f"{minutes // 60} h {minutes % 60} min"


def memory(num_bytes: float) -> str:
    """Bytes as MiB below one GiB, else GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def peak_bytes() -> int:
    """The most memory in use so far: the accelerator's where there is one, else this process's."""
    from hybrid_rlhf.engine.device_memory import meter

    if peak := meter.highest(device()):
        return peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def summary_table(rows: list[dict], title: str) -> None:
    """Print rows (dicts; the columns are all their keys, the first one names the row) as a table on stdout."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(k for row in rows for k in row))
    table = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name.replace("_", " "), justify="right" if place else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(c), [r.get(c) for r in rows]) for c in columns))
    Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False).print(table)


def _cell(value: object, column: list) -> str:
    """A cell's text; floats of one column have the same decimals: three, or one where any reaches 10."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    is_large = any(isinstance(v, float) and abs(v) >= 10 for v in column)
    return f"{value:.1f}" if is_large else f"{value:.3f}"


def forecast_line(pace: Pace) -> str:
    """The time of the steps ahead, the one going on in full, and of what else comes: the parts add up to the total."""
    (count, steps), others = pace.steps_left(), pace.phases_left()
    more = " more" * (count < pace.total - pace.first)
    words, step = f"{count}{more} step{'s' * (count != 1)}", float(f"{steps / max(1, count):.2g}")
    left, after = float("inf"), "of it"
    if pace.max_seconds is not None:  # the step that reaches the limit is finished
        left = max(1, math.ceil((pace.max_seconds - pace.before_step) / step)) if step else left
    if left < count:  # what comes more than once comes within the limit, except its last time
        others, after = {name: pace.phase_seconds(name) or 0.0 for name in others}, "after them"
        count, words = int(left), f"about {left:.0f} of {words}, by train.max_seconds,"
    rest = sum(others.values())
    total, source = roughly(count * step + rest), f", {pace.forecast.source}" * bool(pace.forecast.source)
    rest = f"; {roughly(rest)} {after} for {', '.join(others)}" if rest >= 0.5 else ""
    return f"time: about {total} ({words} of about {number(step)} s{source}{rest})"
