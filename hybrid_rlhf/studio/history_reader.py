"""The metrics of runs: metrics.jsonl read as it grows, in bounded memory, and given out as curves.

Of every metric at most MAX_BUCKETS buckets are kept. As long as a run has fewer steps a bucket is one step, with its
very value; then neighbours are merged, into their lowest, highest and mean value.
"""

from __future__ import annotations

import math
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from hybrid_rlhf.report.alarms import Alarm, answered, find
from hybrid_rlhf.studio.run_files import ANSWERS, METRICS, GrowingLines, Unreadable, last_rows, row_of
from hybrid_rlhf.studio.studio import Refused

MAX_BUCKETS, MAX_NAMES, MAX_LENGTH = 2048, 400, 200  # buckets of a metric; metrics of a run; characters of a name
MAX_READ = 256 * 2**20  # bytes that one request reads; the next one goes on
MAX_HISTORIES = 8  # runs whose history is kept
MAX_ASKED, POINTS = 60, (2, 2000)  # metrics of one request; the fewest and most points of a curve
T = TypeVar("T")
_MISSING = -1  # number of values of a bucket whose rows do not have the metric


class Point(NamedTuple):
    """A bucket: its last step, and its values; None where none was a finite number. num_finite: of those."""

    step: int
    low: float | None
    high: float | None
    mean: float | None
    num_finite: int


class Bucket(NamedTuple):
    """The values of some rows: of the finite ones lowest, highest, sum and number; where the first one was that is not
    finite, and how many were no numbers at all."""

    low: float
    high: float
    total: float
    num_finite: int
    not_finite_at: int | None = None
    num_not_numbers: int = 0


class Column:
    """The buckets of one metric, by place."""

    def __init__(self) -> None:
        self.low, self.high, self.total, self.count = array("d"), array("d"), array("d"), array("l")

    def put(self, place: int, low: float, high: float, total: float, count: int) -> None:
        """The bucket `place`; those before it that there is nothing of are missing."""
        gap = place - len(self.count)
        if gap:
            self.low.extend([math.inf] * gap)
            self.high.extend([-math.inf] * gap)
            self.total.extend([0.0] * gap)
            self.count.extend([_MISSING] * gap)
        self.low.append(low)
        self.high.append(high)
        self.total.append(total)
        self.count.append(count)

    def merged(self, start: int, end: int) -> tuple[float, float, float, int]:
        """low, high, total and count of the buckets from start to end."""
        counts = self.count[start:end]
        if not counts or max(counts) == _MISSING:
            return math.inf, -math.inf, 0.0, _MISSING
        return (min(self.low[start:end]), max(self.high[start:end]), sum(self.total[start:end]),
                sum(c for c in counts if c > 0))

    def halve(self) -> None:
        """Each two neighbours become one."""
        halves = [self.merged(i, i + 2) for i in range(0, len(self.count), 2)]
        for name, values in zip(("low", "high", "total", "count"), zip(*halves, strict=True), strict=True):
            setattr(self, name, array("l" if name == "count" else "d", values))


class Table:
    """Rows of metrics with rising steps. width: rows of a bucket."""

    def __init__(self) -> None:
        self.width, self.steps = 1, array("q")
        self.columns: dict[str, Column] = {}
        self._waiting: list[dict] = []
        self.first_not_finite: tuple[int, str] | None = None
        self.num_not_numbers, self.has_more_names = 0, False
        self.last: int | None = None

    def add(self, row: dict) -> None:
        """A row with an int as "step"."""
        self.last = row["step"]
        self._waiting.append({name: _light(value) for name, value in islice(row.items(), MAX_NAMES + 1)})
        if len(self._waiting) == self.width:
            self._close()

    def points(self, name: str, most: int) -> Iterator[Point]:
        """The metric in at most `most` buckets, oldest first; steps without it are passed over."""
        column, is_within = self.columns.get(name), bool(self._waiting) and self.width > 1
        if column is not None:
            at_once = -(-len(self.steps) // max(1, most - is_within))
            for start in range(0, len(column.count), at_once):
                end = min(start + at_once, len(self.steps))
                low, high, total, count = column.merged(start, end)
                if count != _MISSING:
                    yield _point(self.steps[end - 1], low, high, total, count)
        if is_within and (bucket := _bucket(self._waiting, name)).num_finite != _MISSING:
            yield _point(self._waiting[-1]["step"], *bucket[:4])

    def rows(self) -> list[dict]:
        """The buckets as rows of means, as report/alarms.py reads them; None where no value was finite."""
        found: list[dict] = [{"step": step} for step in self.steps]
        for name, column in self.columns.items():
            for row, total, count in zip(found, column.total, column.count, strict=False):
                if count != _MISSING:
                    row[name] = total / count if count else None
        return found

    def total(self, name: str) -> float:
        """The sum of all values of a metric."""
        return sum(p.mean * p.num_finite for p in self.points(name, MAX_BUCKETS) if p.mean is not None)

    def _close(self) -> None:
        """The waiting rows become a bucket."""
        rows, place = self._waiting, len(self.steps)
        self._waiting = []
        for name in self._names_of(rows):
            column = self.columns.get(name)
            if column is None:
                if len(self.columns) >= MAX_NAMES or len(name) > MAX_LENGTH:
                    self.has_more_names = True
                    continue
                column = Column()
            bucket = _bucket(rows, name)
            self.num_not_numbers += bucket.num_not_numbers
            if self.first_not_finite is None and bucket.not_finite_at is not None:
                self.first_not_finite = bucket.not_finite_at, name
            if bucket.num_finite != _MISSING:
                self.columns[name] = column
                column.put(place, *bucket[:4])
        self.steps.append(rows[-1]["step"])
        if len(self.steps) == MAX_BUCKETS:
            self.steps = self.steps[1::2]
            for column in self.columns.values():
                column.halve()
            self.width *= 2

    @staticmethod
    def _names_of(rows: list[dict]) -> Iterable[str]:
        names = rows[0].keys()
        if any(row.keys() != names for row in rows):
            names = dict.fromkeys(name for row in rows for name in row).keys()
        return [name for name in names if name != "step"]


def _light(value: object) -> object:
    """What waits for its bucket is small, whatever a file holds."""
    return value if value is None or isinstance(value, (int, float)) else ""


def _bucket(rows: list[dict], name: str) -> Bucket:
    """The values of a metric in some rows."""
    values = [row[name] for row in rows if name in row]
    try:
        total = sum(values)
        if type(total) is float and math.isfinite(total):  # the common case: all are numbers
            return Bucket(min(values), max(values), total, len(values))
    except TypeError:
        pass
    numbers = [(row["step"], value) for row in rows if name in row and (value := _number(row[name])) is not None]
    finite = [value for _, value in numbers if math.isfinite(value)]
    bad, num_others = next((s for s, value in numbers if not math.isfinite(value)), None), len(values) - len(numbers)
    if not finite:
        return Bucket(math.inf, -math.inf, 0.0, 0 if numbers else _MISSING, bad, num_others)
    largest = sys.float_info.max
    return Bucket(min(finite), max(finite), max(-largest, min(largest, sum(finite))), len(finite), bad, num_others)


def _number(value: object) -> float | None:
    """A value as a float: null, which a run writes for what is not finite, is nan; None for what is no number."""
    if value is None:
        return math.nan
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _point(step: int, low: float, high: float, total: float, count: int) -> Point:
    return Point(step, low, high, total / count, count) if count else Point(step, None, None, None, 0)


class History:
    """The metrics of the run in `folder`. Not for two threads at once: `Histories` sees to that."""

    def __init__(self, folder: Path) -> None:
        self._lines = GrowingLines(folder / METRICS)
        self._start_over()

    def _start_over(self) -> None:
        self.trained, self.held_out = Table(), Table()
        self._num_no_rows = self._num_backwards = 0
        self.is_whole = False

    @property
    def step(self) -> int | None:
        """The last one."""
        return max((table.last for table in self._tables() if table.last is not None), default=None)

    @property
    def names(self) -> list[str]:
        """Of all metrics, held-out ones last, each by its first row."""
        return list(dict.fromkeys(name for table in self._tables() for name in table.columns))

    @property
    def notes(self) -> list[str]:
        """What of the file could not be taken, a line each."""
        tables = self._tables()
        told = [(self._num_no_rows, "{} lines that are no rows were passed over"),
                (self._num_backwards, "{} rows whose step is not after the one before were passed over"),
                (self._lines.num_too_long, "{} lines were too long and were passed over"),
                (sum(t.num_not_numbers for t in tables), "{} values are no numbers and were passed over"),
                (any(t.has_more_names for t in tables), f"it has more than {MAX_NAMES} metrics; no others are read"),
                (not self.is_whole, "it is not read to its end yet")]
        return [f"{METRICS}: " + text.format(count) for count, text in told if count]

    def update(self, most: int = MAX_READ) -> None:
        """Read on. Raises Unreadable."""
        self.is_whole = self._lines.update(self._start_over, self._take, most)

    def curve(self, name: str, most: int) -> list[Point]:
        """A metric in at most `most` buckets; none for one that there is not."""
        return next((found for table in self._tables() if (found := list(table.points(name, most)))), [])

    def alarms(self, answers: list[dict]) -> list[Alarm]:
        """What report/alarms.py finds. Beyond MAX_BUCKETS steps it reads means of several, and no rise within few steps
        can be told from a slow one. answers: to the fixed prompts, the last ones."""
        rows = self.trained.rows() + self.held_out.rows()
        bad = self.trained.first_not_finite or self.held_out.first_not_finite
        if bad is not None:  # of several steps, a mean hides it
            rows.insert(1, {"step": bad[0], bad[1]: None})  # not the first one, which names the sources
        is_thinned = self.trained.width > 1
        return [a for a in find(rows) if not (is_thinned and a.name == "KL spike")] + answered(answers)

    def total(self, name: str) -> float:
        return self.trained.total(name)

    def highest(self, name: str) -> float:
        return max((p.high for p in self.curve(name, 1) if p.high is not None), default=0.0)

    def _tables(self) -> tuple[Table, Table]:
        return self.trained, self.held_out

    def _take(self, _place: int, line: bytes) -> None:
        if not line:
            return
        row = row_of(line)
        step = row.get("step") if row is not None else None
        if row is None or type(step) is not int or not 0 <= step < 2**53:
            self._num_no_rows += 1
            return
        table = self.held_out if b'"eval/' in line else self.trained
        if table.last is not None and step <= table.last:
            self._num_backwards += 1
        else:
            table.add(row)


class Histories:
    """The histories of the runs that were asked for last, in all threads' use."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[threading.Lock, History]] = OrderedDict()
        self._lock = threading.Lock()

    def look(self, folder: Path, use: Callable[[History], T], most: int = MAX_READ, seconds: float = -1) -> T | None:
        """What `use` makes of the history of the run in `folder`, read on by at most about `most` bytes; None where
        another thread has been reading it for `seconds`. Raises Unreadable."""
        with self._lock:
            if folder not in self._known:
                self._known[folder] = threading.Lock(), History(folder)
            self._known.move_to_end(folder)
            lock, history = self._known[folder]
            while len(self._known) > MAX_HISTORIES:
                self._known.popitem(last=False)
        if not lock.acquire(timeout=seconds):
            return None
        try:
            history.update(most)
            return use(history)
        finally:
            lock.release()


def alarms_of(histories: Histories, folder: Path, most: int = MAX_READ) -> list[Alarm] | None:
    """The alarms of a run that has no report; None while more than `most` bytes are to be read, or others read them."""
    answers = last_rows(folder / ANSWERS)
    steps = [row["step"] for row in answers if type(row.get("step")) is int]
    last = [row for row in answers if row.get("step") == max(steps)] if steps else []
    return histories.look(folder, lambda found: found.alarms(last) if found.is_whole else None, most, 0.2)


def told(histories: Histories, folder: Path, query: dict[str, str]) -> dict:
    """GET /api/history: names (a,b) in at most `points` buckets each."""
    names = [name for name in query.get("names", "").split(",") if name][:MAX_ASKED]
    try:
        most = min(max(int(query.get("points", "400")), POINTS[0]), POINTS[1])
    except ValueError:
        raise Refused(400, "points must be a number") from None

    def use(history: History) -> dict:
        curves = {name: history.curve(name, most) for name in names}
        return {"step": history.step, "notes": history.notes, "series": {
            name: {"steps": [p.step for p in points], "low": [p.low for p in points],
                   "high": [p.high for p in points], "mean": [p.mean for p in points]}
            for name, points in curves.items() if points}}

    try:
        return histories.look(folder, use) or {}
    except Unreadable as error:
        return {"step": None, "notes": [str(error)], "series": {}}
