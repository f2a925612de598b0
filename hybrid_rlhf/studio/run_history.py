"""Incremental readers of a run's metrics, alarms, samples and answers by step."""

from __future__ import annotations

import math
import re
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from hybrid_rlhf.core.image_files import thumbnails
from hybrid_rlhf.report.alarms import Alarm, answered, find
from hybrid_rlhf.studio.run_files import ANSWERS, METRICS, SAMPLES, GrowingLines, last_rows, row_of

MAX_RUNS = 8  # whose metrics are kept in memory
ALARM_READ = 16 * 2**20  # bytes of metrics read in one search for alarms; the next one continues
MAX_ROWS = 2048  # rows searched for alarms; a longer run is averaged over neighbours
MAX_ANSWERS, MAX_TEXT = 200, 20_000  # of one request; characters of a prompt or answer
MAX_STEP_BYTES = 16 * 2**20  # of the samples of one step
_STEP = re.compile(rb'\{"step": ?(\d{1,15})[,}]')  # beginning of a row of samples
_TURN = re.compile(r"^\[([^\[\]\n]{1,64})\] ", re.MULTILINE)  # turns of an episode (rollout/episode_record.py)
T = TypeVar("T")


class Point(NamedTuple):
    """One or several neighbouring steps: the last step, and low, high and mean of their values; None without finite
    ones."""

    step: int
    low: float | None
    high: float | None
    mean: float | None


class Table:
    """Rows of metrics with increasing steps. columns: per metric the indices of its rows, and its values; nan for
    infinite ones too."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, tuple[array, array]] = {}
        self.first_not_finite: tuple[int, str] | None = None

    def add(self, row: dict) -> None:
        step, place = row["step"], len(self.steps)
        for name, value in row.items():
            if name == "step" or not (value is None or isinstance(value, (int, float))):
                continue
            number = math.nan if value is None else float(value)
            if not math.isfinite(number):
                self.first_not_finite = self.first_not_finite or (step, name)
                number = math.nan
            places, values = self.columns.get(name) or self.columns.setdefault(name, (array("l"), array("d")))
            places.append(place)
            values.append(number)
        self.steps.append(step)

    def buckets(self, name: str, width: int) -> Iterator[tuple[int, Sequence[float]]]:
        """The metric in buckets of `width` neighbouring rows: the index of each bucket's last row, and its finite
        values. Buckets without the metric are left out."""
        places, values = self.columns.get(name, ((), ()))
        start = 0
        while start < len(places):
            after = (places[start] // width + 1) * width
            end = bisect_left(places, after, start, min(start + width, len(places)))
            bucket = values[start:end]
            total = sum(bucket)
            yield min(after, len(self.steps)) - 1, bucket if total == total else [v for v in bucket if v == v]
            start = end

    def curve(self, name: str, most: int) -> list[Point]:
        """The metric in at most `most` points, oldest first."""
        return [Point(self.steps[place], min(values, default=None), max(values, default=None),
                      sum(values) / len(values) if values else None)
                for place, values in self.buckets(name, -(-len(self.steps) // most))]

    def rows(self) -> list[dict]:
        """At most MAX_ROWS rows for report/alarms.py; None for values that are not finite."""
        width = max(1, -(-len(self.steps) // MAX_ROWS))
        rows: list[dict] = [{"step": self.steps[min(start + width, len(self.steps)) - 1]}
                            for start in range(0, len(self.steps), width)]
        for name in self.columns:
            for place, values in self.buckets(name, width):
                rows[place // width][name] = sum(values) / len(values) if values else None
        return rows


class Metrics:
    """Training and held-out metrics of the run in `folder`. Not thread-safe (see `Histories`)."""

    def __init__(self, folder: Path) -> None:
        self._lines = GrowingLines(folder / METRICS)
        self._start_over()

    def _start_over(self) -> None:
        self._tables = self.trained, self.held_out = Table(), Table()
        self._num_damaged = 0

    @property
    def step(self) -> int | None:
        """The last step."""
        return max((table.steps[-1] for table in self._tables if table.steps), default=None)

    @property
    def names(self) -> list[str]:
        """Names of all metrics in order of appearance, held-out ones last."""
        return list(dict.fromkeys(name for table in self._tables for name in table.columns))

    @property
    def notes(self) -> list[str]:
        return [f"{METRICS}: {self._num_damaged} damaged lines were skipped"] if self._num_damaged else []

    def update(self, most: float = math.inf) -> bool:
        """Read about `most` new bytes; returns whether that reached the end."""
        return self._lines.update(self._start_over, self._take, most)

    def curve(self, name: str, most: int) -> list[Point]:
        """A metric in at most `most` points; [] for an unknown one."""
        return next((points for table in self._tables if (points := table.curve(name, most))), [])

    def total(self, name: str) -> float:
        """The sum of all training values."""
        return sum(sum(values) for _, values in self.trained.buckets(name, len(self.trained.steps)))

    def highest(self, name: str) -> float:
        return max((point.high for point in self.curve(name, 1) if point.high is not None), default=0.0)

    def alarms(self, answers: list[dict]) -> list[Alarm]:
        """The alarms of report/alarms.py. With more than MAX_ROWS steps it reads means, which do not distinguish a KL
        spike from a slow rise. answers: the last ones to the fixed prompts."""
        rows = self.trained.rows() + self.held_out.rows()
        bad = self.trained.first_not_finite or self.held_out.first_not_finite
        if bad is not None and rows:  # means would hide it
            rows.insert(1, {"step": bad[0], bad[1]: None})  # not the first row, which names the sources
        is_thinned = len(self.trained.steps) > MAX_ROWS
        trained = [row for row in answers if row["step"] > 0]  # at step 0 the model is not trained yet
        return [a for a in find(rows) if not (is_thinned and a.name == "KL spike")] + answered(trained)

    def _take(self, _place: int, line: bytes) -> None:
        row = row_of(line)
        table = self.held_out if b'"eval/' in line else self.trained
        if row is None or not isinstance(step := row.get("step"), int) or (table.steps and step <= table.steps[-1]):
            self._num_damaged += 1
        else:
            table.add(row)


class SampleIndex:
    """Index of a samples.jsonl: the position of each step's first sample."""

    def __init__(self, folder: Path) -> None:
        self._lines = GrowingLines(folder / SAMPLES)
        self._start_over()

    def _start_over(self) -> None:
        self.places: dict[int, int] = {}  # step -> byte

    def update(self) -> None:
        self._lines.update(self._start_over, self._take)

    def read(self, step: int | None, most: int) -> list[dict]:
        """The first `most` samples of a step (None: the newest); [] for a step without samples."""
        step = next(reversed(self.places), None) if step is None else step
        if step not in self.places:
            return []
        with self._lines.path.open("rb") as file:
            file.seek(self.places[step])
            lines = file.read(MAX_STEP_BYTES).split(b"\n")
        rows: list[dict] = []
        for line in lines:
            row = row_of(line)
            if row is None or len(rows) == most or row.get("step") != step:
                break
            rows.append(shown(row))
        return rows

    def _take(self, place: int, line: bytes) -> None:
        if begin := _STEP.match(line):
            self.places.setdefault(int(begin.group(1)), place)


class Histories:
    """Thread-safe cache of metrics and samples of the last MAX_RUNS runs."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[threading.Lock, Metrics, SampleIndex]] = OrderedDict()
        self._lock = threading.Lock()

    def metrics(self, folder: Path, use: Callable[[Metrics], T]) -> T:
        """Apply `use` to the metrics of the run in `folder`, read to the end."""
        lock, metrics, _ = self._of(folder)
        with lock:
            metrics.update()
            return use(metrics)

    def alarms(self, folder: Path) -> list[Alarm] | None:
        """The alarms of a run without a report; None while its metrics are not read to the end."""
        lock, metrics, _ = self._of(folder)
        with lock:
            return metrics.alarms(newest_answers(folder)) if metrics.update(ALARM_READ) else None

    def samples(self, folder: Path, use: Callable[[SampleIndex], T]) -> T:
        """Apply `use` to the samples of the run in `folder`."""
        lock, _, index = self._of(folder)
        with lock:
            index.update()
            return use(index)

    def _of(self, folder: Path) -> tuple[threading.Lock, Metrics, SampleIndex]:
        with self._lock:
            if folder not in self._known:
                self._known[folder] = threading.Lock(), Metrics(folder), SampleIndex(folder)
            self._known.move_to_end(folder)
            while len(self._known) > MAX_RUNS:
                self._known.popitem(last=False)
            return self._known[folder]


# -- requests of the pages ---------------------------------------------------------------------------------------------


def curves(histories: Histories, folder: Path, query: dict[str, str]) -> dict:
    """GET /api/history: names (a,b) in at most `points` points each."""
    names, most = query["names"].split(","), int(query.get("points", 400))

    def use(metrics: Metrics) -> dict:
        series = {name: points for name in names if (points := metrics.curve(name, most))}
        return {"step": metrics.step, "notes": metrics.notes, "series": {
            name: {"steps": [p.step for p in points], "low": [p.low for p in points],
                   "high": [p.high for p in points], "mean": [p.mean for p in points]}
            for name, points in series.items()}}

    return histories.metrics(folder, use)


def samples(histories: Histories, folder: Path, query: dict[str, str]) -> dict:
    """GET /api/samples: samples of a step (default: the newest), and the answers to the fixed prompts."""
    step, most = int(query["step"]) if "step" in query else None, int(query.get("limit", 20))
    steps, rows = histories.samples(folder, lambda index: (list(index.places), index.read(step, most)))
    return {"steps": steps, "samples": with_pictures(rows), "answers": with_pictures(fixed_answers(folder))}


def fixed_answers(folder: Path) -> list[dict]:
    """The newest answers to the fixed prompts, oldest first."""
    rows = [row for row in last_rows(folder / ANSWERS, 2**20) if isinstance(row.get("step"), int)]
    return [shown(row) for row in rows[-MAX_ANSWERS:]]


def newest_answers(folder: Path) -> list[dict]:
    """The answers of the last step."""
    rows = fixed_answers(folder)
    last = max((row["step"] for row in rows), default=None)
    return [row for row in rows if row["step"] == last]


def with_pictures(rows: Sequence[dict]) -> list[dict]:
    """Samples with small pictures in place of the files of their prompts' images."""
    return [row | {"images": pictures(row["images"])} if isinstance(row.get("images"), list) else row for row in rows]


def pictures(paths: Sequence[object]) -> list[dict]:
    """Images for the page, [{"name", "url"}], as `thumbnails` has them: small and encoded anew. The files are those
    that a run or rows of data name: a request names none."""
    return [{"name": name, "url": url} for name, url in thumbnails(paths)]


def shown(row: dict) -> dict:
    """A sample for the page: with shortened texts, and without tokens. The text of an episode also as "turns":
    [{"who", "text"}]."""
    sample = {name: f"{value[:MAX_TEXT]} … ({len(value) - MAX_TEXT} more characters)"
              if isinstance(value, str) and len(value) > MAX_TEXT else value
              for name, value in row.items() if name != "replay"}
    return sample | ({"turns": turns(sample["completion"])} if "ended_by" in row else {})


def turns(text: str) -> list[dict]:
    """The turns of an episode's text. A line of an answer that looks like the beginning of a turn is parsed as one."""
    begins = list(_TURN.finditer(text))
    ends = [begin.start() for begin in begins[1:]] + [len(text)]
    before = [{"who": "", "text": text[: begins[0].start()].strip()}] if begins and begins[0].start() else []
    return before + [{"who": begin.group(1), "text": text[begin.end():end].rstrip("\n")}
                     for begin, end in zip(begins, ends, strict=False)]
