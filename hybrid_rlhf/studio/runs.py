"""All runs below the outputs as rows of a list: what each is, how far it is, and whether something is wrong."""

from __future__ import annotations

import math
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from hybrid_rlhf.report.alarms import Alarm
from hybrid_rlhf.studio import run_files, run_parents
from hybrid_rlhf.studio.history_reader import Histories, alarms_of
from hybrid_rlhf.studio.run_files import ANSWERS, METRICS, RECORD, REPORT, SETTINGS, Mark, Unreadable, mark
from hybrid_rlhf.studio.run_parents import Parent
from hybrid_rlhf.studio.run_tree import RunTree
from hybrid_rlhf.studio.studio import Refused, Studio

STATUSES = ("running", "finished", "stopped", "failed")
# What says most of a run, best first: two that it has make the row's headline, and the first one's held-out value.
HEADLINES = ("reward", "distill/divergence", "rewards/accuracies", "accuracy", "kl", "loss", "mean_token_accuracy")
MAX_ERROR = 500  # characters of what a run failed by
ALARM_READ = 16 * 2**20  # bytes that one look at the list reads to look for alarms; the next look goes on
ALARM_WAIT, SIZE_WAIT = 10.0, 30.0  # seconds between two looks for alarms in a run, and at its size, while it grows
_RUN_LINE = re.compile(r"run: (\d{1,12}) steps? ")  # of the lines that a run begins with (training/announce.py)
_ALARM = re.compile(r"- \*\*(.{1,100}?)\*\*: (.{1,2000})")  # of report.md (report/summary.py)


@dataclass
class Record:
    """What is kept of a run.json; of a damaged one only `error` and what is wrong."""

    stage: str = ""
    status: str = "failed"
    total: int | None = None
    max_seconds: float | None = None
    started: datetime | None = None
    finished: str | None = None
    seconds: float = 0.0
    error: str | None = None
    parents: list[Parent] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Known:
    """What was found out about a run, each beside the mark of the files that it was found in."""

    folder: Path
    record: Record = field(default_factory=Record)
    record_mark: object = ""
    lost_mark: object = ""
    step: int | None = None
    headline: list[dict] = field(default_factory=list)
    metrics_mark: object = ""
    bytes: int = 0
    has_model: bool = False
    size_mark: object = ""
    sized_at: float = -math.inf
    alarms: list[Alarm] | None = None
    alarm_mark: object = ""
    alarmed_at: float = -math.inf
    damage: dict[str, str] = field(default_factory=dict)


class RunList:
    """The rows of all runs. Everything is read anew only where its file has changed. num_read: files that were read so
    far, for tests."""

    def __init__(self, studio: Studio, histories: Histories) -> None:
        self.outputs, self.num_read = studio.outputs, 0
        self._studio, self._histories = studio, histories
        self._tree, self._lock = RunTree(studio.outputs), threading.Lock()
        self._known: dict[str, _Known] = {}
        self._alarm_bytes = 0

    def told(self) -> dict:
        """GET /api/runs."""
        rows, notes = self.rows()
        try:
            free = shutil.disk_usage(self.outputs).free
        except OSError as error:
            raise Refused(503, f"{self.outputs} cannot be read: {error.strerror}") from error
        return {"folder": str(self.outputs), "runs": rows, "bytes": sum(row["bytes"] for row in rows), "free": free,
                "notes": notes}

    def rows(self) -> tuple[list[dict], list[str]]:
        """All of them, newest first, and a line for each thing that cannot be shown."""
        with self._lock:
            notes = self._find()
            rows = [self._row(run) for run, known in self._known.items() if mark(known.folder / RECORD) is not None]
            rows.sort(key=self._age)
            return rows, notes

    def row(self, run: str) -> dict:
        """One of them. Refused where there is none."""
        return self._one(run)[0]

    def alarms(self, run: str) -> list[Alarm]:
        """As the row counts them."""
        return self._one(run)[1].alarms or []

    def _one(self, run: str) -> tuple[dict, _Known]:
        folder = self._studio.folder(run)
        if not run_files.is_file(folder / RECORD):
            raise Refused(404, f"there is no run {run[:100]!r}")
        with self._lock:
            if run not in self._known:
                self._find()
            self._alarm_bytes = ALARM_READ
            known = self._known.setdefault(run, _Known(folder))
            return self._row(run), known

    def _find(self) -> list[str]:
        found, notes = self._tree.find()
        self._known = {run: self._known.get(run) or _Known(self.outputs / run) for run in found}
        self._alarm_bytes = ALARM_READ
        return notes

    def _age(self, row: dict) -> tuple[float, str]:
        known = self._known[row["id"]]
        if known.record.started is not None:
            return -known.record.started.timestamp(), row["id"]
        return -(known.record_mark[2] / 1e9 if isinstance(known.record_mark, tuple) else 0.0), row["id"]

    def _row(self, run: str) -> dict:
        known = self._known[run]
        status = self._status(run, known)
        record = known.record
        self._measure(known)
        self._weigh(known, status)
        self._look_for_alarms(known, status)
        return {"id": run, "stage": record.stage, "status": status, "step": known.step, "max_steps": record.total,
                "max_seconds": record.max_seconds, "started": _text(record.started), "finished": record.finished,
                "seconds": _seconds(known, status), "headline": known.headline,
                "parents": run_parents.shown(run, record.parents, self._known),
                "alarms": None if known.alarms is None else len(known.alarms), "bytes": known.bytes,
                "has_model": known.has_model, "error": record.error or next(iter(known.damage.values()), None)}

    def _status(self, run: str, known: _Known) -> str:
        """What run.json says; "lost" where it says running and nobody holds the run's lock."""
        for _ in range(3):  # a run that ends writes run.json first, and gives the lock back then
            now = mark(known.folder / RECORD)
            if now != known.record_mark:
                self.num_read += 1
                known.record, known.record_mark = read_record(run, known.folder, self.outputs), now
            if known.record.status != "running":
                return known.record.status
            both = now, mark(known.folder / SETTINGS)
            if both == known.lost_mark:
                return "lost"  # its lock is tried no more, so that nobody who takes it up then finds it taken
            if run_files.is_held(known.folder) is not False:
                return "running"
            known.lost_mark = both  # if run.json has not changed meanwhile
        return "running"

    def _measure(self, known: _Known) -> None:
        now = mark(known.folder / METRICS), known.record_mark
        if now == known.metrics_mark:
            return
        self.num_read += 1
        known.metrics_mark, rows = now, []
        known.damage.pop(METRICS, None)
        try:
            rows = run_files.last_rows(known.folder / METRICS)
        except Unreadable as error:
            known.damage[METRICS] = str(error)
        known.step = next((row["step"] for row in reversed(rows) if type(row.get("step")) is int), None)
        known.headline = headline(known.record.metrics | {
            name: value for row in rows for name, value in row.items() if name != "step"})

    def _weigh(self, known: _Known, status: str) -> None:
        """The folder's size; where it grows, of a moment ago."""
        now = [mark(known.folder / name) for name in ("", RECORD, run_files.CHECKPOINTS, run_files.MODEL)]
        if now != known.size_mark or (status == "running" and time.monotonic() - known.sized_at > SIZE_WAIT):
            self.num_read += 1
            known.bytes, known.has_model = run_files.size_of(known.folder), run_files.has_model(known.folder)
            known.size_mark, known.sized_at = now, time.monotonic()

    def _look_for_alarms(self, known: _Known, status: str) -> None:
        """Those of the report where there is one; else those of the metrics so far."""
        marks = [mark(known.folder / name) for name in (METRICS, ANSWERS, REPORT)]
        now, is_recent = [status, *marks], time.monotonic() - known.alarmed_at < ALARM_WAIT
        if now == known.alarm_mark or (status == "running" and is_recent) or self._alarm_bytes <= 0:
            return
        self.num_read += 1
        known.damage.pop(REPORT, None)
        try:
            text = run_files.read_text(known.folder / REPORT, 2**20) if status == "finished" else None
            if text is not None and "\n## Alarms\n" in text:
                found: list[Alarm] | None = reported(text)
            else:
                found = alarms_of(self._histories, known.folder, self._alarm_bytes)
                self._alarm_bytes -= marks[0][1] if marks[0] else 0
        except Unreadable as error:
            found, known.damage[REPORT] = [], str(error)
        if found is not None:
            known.alarms, known.alarm_mark, known.alarmed_at = found, now, time.monotonic()


def read_record(run: str, folder: Path, outputs: Path) -> Record:
    """A run's run.json. One that cannot be read makes a failed run, whose error says why."""
    try:
        found = run_files.read_object(folder / RECORD)
    except Unreadable as error:
        return Record(error=str(error))
    status, stage = found.get("status"), found.get("stage")
    if status not in STATUSES or not isinstance(stage, str):
        return Record(error=f"{RECORD} is damaged: it names no stage and status of a run")
    words, config, metrics = found.get("error"), found.get("config"), found.get("metrics")
    train = config.get("train") if isinstance(config, dict) else None
    train = train if isinstance(train, dict) else {}
    return Record(
        stage[:100], status, _total(found, train), number(train.get("max_seconds")), moment(found.get("started")),
        _text(moment(found.get("finished"))), number(found.get("seconds")) or 0.0,
        words.strip().rpartition("\n")[2][:MAX_ERROR] if isinstance(words, str) else None,
        run_parents.parents_of(run, found, outputs),
        {k: v for k, v in metrics.items() if number(v) is not None} if isinstance(metrics, dict) else {})


def headline(values: Mapping[str, object]) -> list[dict]:
    """Two or three of a run's metrics that say most; of a run with none of the known ones the first three."""
    known = [name for name in HEADLINES if number(values.get(name)) is not None][:2]
    names = [known[0], f"eval/{known[0]}", *known[1:]] if known else list(values)[:3]
    return [{"name": name[:200], "value": values[name]} for name in names if number(values.get(name)) is not None]


def reported(text: str) -> list[Alarm]:
    """The alarms that a run's report.md tells of."""
    lines = text.partition("\n## Alarms\n")[2].partition("\n## ")[0].splitlines()
    return [Alarm(*found.groups()) for line in lines if (found := _ALARM.match(line))]


def number(value: object) -> float | None:
    """A finite number as it is; None for anything else."""
    try:
        return value if isinstance(value, (int, float)) and math.isfinite(value) else None
    except OverflowError:
        return None


def moment(value: object) -> datetime | None:
    """An ISO time; one without a zone is UTC."""
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found is not None and found.tzinfo is None else found


def _text(when: datetime | None) -> str | None:
    return None if when is None else when.isoformat(timespec="milliseconds")


def _total(record: Mapping, train: Mapping) -> int | None:
    """How many steps a run is to have: as it said when it began, else by its settings."""
    facts = record.get("facts")
    header = facts.get("header") if isinstance(facts, dict) else None
    for line in (header if isinstance(header, list) else [])[:50]:
        if isinstance(line, str) and (found := _RUN_LINE.match(line)):
            return int(found.group(1))
    steps = train.get("max_steps")
    return steps if type(steps) is int and 0 < steps < 10**12 else None


def _seconds(known: _Known, status: str) -> float:
    """How long a run has taken, over all its processes: what run.json says of those before, and since this one began,
    when it wrote its settings."""
    before, began = known.record.seconds, mark(known.folder / SETTINGS)
    if status not in ("running", "lost") or began is None:
        return before
    last: Mark = mark(known.folder / METRICS)
    until = time.time_ns() if status == "running" else last[2] if last else began[2]
    return round(before + max(0, until - began[2]) / 1e9, 3)
