"""The list of all runs below the outputs: status, progress, parents and alarms of each."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_rlhf.core.own_files import is_locked
from hybrid_rlhf.report.alarms import Alarm
from hybrid_rlhf.studio import run_files
from hybrid_rlhf.studio.run_files import ANSWERS, CHECKPOINTS, METRICS, MODEL, RECORD, SETTINGS, mark
from hybrid_rlhf.studio.run_history import ALARM_READ, Histories
from hybrid_rlhf.studio.studio import Refused, Studio

DEPTH, MAX_FOLDERS = 4, 20_000  # limits of the search for runs
OWN = frozenset((CHECKPOINTS, MODEL, f"{MODEL}_ema", "plots", "trackers", "rows"))  # folders inside a run
# The most informative metrics, best first: a row's headline has two of them, and the first one's held-out value.
HEADLINES = ("reward", "distill/divergence", "rewards/accuracies", "accuracy", "kl", "loss", "mean_token_accuracy",
             "mark/held", "mark/kl")
ALARM_WAIT, SIZE_WAIT = 10.0, 30.0  # seconds between two checks of a running run's alarms, and of its size
_RUN_LINE = re.compile(r"run: (\d{1,12}) steps? ")  # of the header lines of a run (training/announce.py)
_MODEL_LINE = re.compile(r"model: (.+?); trained: ")
_ALARM = re.compile(r"- \*\*(.{1,100}?)\*\*: (.{1,2000})")  # of report.md (report/summary.py)
_OWN_ERROR = re.compile(r"^(UserError|BadAnswer|NotFinite): ")  # these say enough without their names
_INSIDE_RUN = re.compile(r"/(model|model_ema|checkpoints|marks|rows)(/.*)?$")


class Parent(NamedTuple):
    """text: as in the record. ids: candidate runs. is_guess: a default that a run uses if its settings name nothing; it
    counts only if such a run exists."""

    text: str
    ids: tuple[str, ...]
    is_guess: bool = False


@dataclass
class Record:
    """The fields of a run.json that the list needs; only `error` for one that cannot be read."""

    stage: str = ""
    status: str = "failed"
    total: int | None = None
    max_seconds: float | None = None
    started: str | None = None
    finished: str | None = None
    seconds: float = 0.0
    error: str | None = None
    parents: list[Parent] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class RunList:
    """The rows of all runs. A file is read again only if it has changed."""

    def __init__(self, studio: Studio, histories: Histories) -> None:
        self.outputs = studio.outputs
        self._studio, self._histories = studio, histories
        self._lock = threading.Lock()
        self._runs: dict[str, None] = {}  # ordered ids
        self._cache: dict[tuple[str, str], tuple[object, Any]] = {}  # (run, what) -> marks of its files, the result
        self._alarm_lock = threading.Lock()  # of `_alarms`; separate, since searching takes long
        self._alarms: dict[str, tuple[object, list[Alarm] | None]] = {}  # run -> marks of its files, its alarms

    def answer(self) -> dict:
        """GET /api/runs."""
        rows, notes = self.rows()
        return {"folder": str(self.outputs), "runs": rows, "bytes": sum(row["bytes"] for row in rows),
                "free": shutil.disk_usage(self.outputs).free, "notes": notes}

    def rows(self) -> tuple[list[dict], list[str]]:
        """All rows, newest first, and a note for each folder that cannot be shown."""
        with self._lock:
            notes = self._find()
            rows = [self._row(run) for run in self._runs if (self.outputs / run / RECORD).exists()]
            rows.sort(key=lambda row: row["started"] or "", reverse=True)
        if self._alarm_lock.acquire(blocking=False):  # else another thread is searching
            try:
                self._look_for_alarms(rows)
                known = {row["id"] for row in rows}
                self._alarms = {run: value for run, value in self._alarms.items() if run in known}
            finally:
                self._alarm_lock.release()
        return [self._with_alarms(row) for row in rows], notes

    def row(self, run: str) -> dict:
        """The row of a run. Raises Refused if there is none."""
        if not (self._studio.folder(run) / RECORD).is_file():
            raise Refused(404, f"there is no run {run[:100]!r}")
        with self._lock:
            if run not in self._runs:
                self._find()
            row = self._row(run)
        with self._alarm_lock:
            self._look_for_alarms([row])
        return self._with_alarms(row)

    def alarms(self, run: str) -> list[Alarm]:
        """The alarms counted in the row of a run."""
        self.row(run)
        return self._alarms.get(run, (None, None))[1] or []

    def _find(self) -> list[str]:
        runs, notes = find_runs(self.outputs)
        self._runs = dict.fromkeys(runs)
        self._cache = {key: value for key, value in self._cache.items() if key[0] in self._runs}
        return notes

    def _cached(self, run: str, what: str, marks: object, read: Callable[[], Any]) -> Any:
        """The result of `read`, called again only if `marks` differ from those of the last call."""
        known = self._cache.get((run, what))
        if known is None or known[0] != marks:
            known = self._cache[run, what] = marks, read()
        return known[1]

    def _record(self, run: str) -> Record:
        folder = self.outputs / run
        return self._cached(run, "record", mark(folder / RECORD), lambda: read_record(run, folder, self.outputs))

    def _row(self, run: str) -> dict:
        folder, status = self.outputs / run, self._status(run)
        record = self._record(run)
        marks = mark(folder / METRICS), mark(folder / RECORD)
        step, metrics, error = None, {}, record.error
        try:
            if record.stage:
                step, metrics = self._cached(run, "metrics", marks, lambda: _last_metrics(folder, record))
        except OSError as refused:
            error = str(refused)
        slot = time.monotonic() // SIZE_WAIT if status == "running" else None
        size_marks = slot, *(mark(folder / name) for name in ("", RECORD, CHECKPOINTS, MODEL))
        size, has_model = self._cached(
            run, "size", size_marks, lambda: (run_files.size_of(folder), run_files.has_model(folder)))
        return {"id": run, "stage": record.stage, "status": status, "step": step, "max_steps": record.total,
                "max_seconds": record.max_seconds, "started": record.started, "finished": record.finished,
                "seconds": _seconds(folder, record, status), "headline": headline(metrics),
                "parents": parent_names(run, record.parents, self._runs),
                "alarms": None, "bytes": size, "has_model": has_model, "error": error}

    def _status(self, run: str) -> str:
        """The status in run.json; "lost" if that is running but no process holds the run's lock."""
        folder = self.outputs / run
        if not self._record(run).stage:  # it cannot be read, and the lock may not either
            return "failed"
        marks = mark(folder / RECORD), mark(folder / SETTINGS)
        # the lock of a run that has ended is not tested again, since that could block a process that resumes it
        is_held = self._cached(run, "lock", marks, lambda: is_locked(folder / SETTINGS))
        if is_held:
            del self._cache[run, "lock"]
        status = self._record(run).status  # read last: a run that ends writes run.json before it releases the lock
        return "lost" if status == "running" and not is_held else status

    def _with_alarms(self, row: dict) -> dict:
        _, alarms = self._alarms.get(row["id"], (None, None))
        return row | {"alarms": None if alarms is None else len(alarms)}

    def _look_for_alarms(self, rows: list[dict]) -> None:
        """Search for alarms in runs whose files have changed, until about ALARM_READ bytes are read."""
        num_bytes = 0
        for run, status in ((row["id"], row["status"]) for row in rows if row["stage"]):
            folder = self.outputs / run
            metrics = mark(folder / METRICS)
            marks = status, (time.monotonic() // ALARM_WAIT if status == "running" else (
                metrics, mark(folder / ANSWERS), mark(folder / run_files.REPORT)))
            seen, known = self._alarms.get(run, (None, None))
            if num_bytes >= ALARM_READ or seen == marks:
                continue
            try:
                alarms = self._reported_alarms(folder) if status == "finished" else None
                if alarms is None:
                    num_bytes += metrics[1] if metrics else 0
                    alarms = self._histories.alarms(folder)
            except OSError:  # the run's row has the reason
                continue
            # metrics not read to the end continue at the next search
            self._alarms[run] = (None, known) if alarms is None else (marks, alarms)

    @staticmethod
    def _reported_alarms(folder: Path) -> list[Alarm] | None:
        text = run_files.read_text(folder / run_files.REPORT)
        return reported_alarms(text) if text is not None and "\n## Alarms\n" in text else None


def find_runs(outputs: Path) -> tuple[list[str], list[str]]:
    """The ids of all runs, and a note for each folder that is left out. Links, folders whose names begin with a dot and
    folders deeper than DEPTH levels are not searched."""
    runs, notes, num_folders = [], [], 0
    waiting = [("", 0)]
    while waiting:
        name, depth = waiting.pop()
        num_folders += 1
        if num_folders > MAX_FOLDERS:
            notes.append(f"there are more than {MAX_FOLDERS} folders; the others are not shown")
            break
        try:
            entries = list(os.scandir(outputs / name))
        except FileNotFoundError:  # removed in the meantime
            continue
        except OSError as error:
            notes.append(f"{name or outputs} cannot be read: {error.strerror}")
            continue
        is_run = any(entry.name == RECORD and entry.is_file() for entry in entries)
        if is_run and name:
            runs.append(name)
        elif is_run:
            notes.append("this folder is itself a run; give --outputs the folder above it to see it")
        waiting += [(f"{name}/{entry.name}" if name else entry.name, depth + 1) for entry in entries
                    if depth < DEPTH and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                    and not (is_run and name and entry.name in OWN)]
    return sorted(runs), notes


# -- parsing a run's files ------------------------------------------------------------------------------------------


def read_record(run: str, folder: Path, outputs: Path) -> Record:
    """Parse a run's run.json. One that cannot be read gives a failed run with the reason as its error."""
    try:
        record = json.loads((folder / RECORD).read_bytes())
        train, error = _inner(record, "config", "train"), (record.get("error") or "").strip().rpartition("\n")[2]
        return Record(
            record["stage"], record["status"], _num_steps(record, train), train.get("max_seconds"),
            record.get("started"), record.get("finished"), record.get("seconds") or 0.0,
            _OWN_ERROR.sub("", error)[:500] or None, parents_of(run, record, outputs),
            dict(record.get("metrics") or {}))
    except Exception as error:  # of whatever another program wrote under this name
        return Record(error=f"{RECORD} is damaged: {type(error).__name__}: {error}")


def _last_metrics(folder: Path, record: Record) -> tuple[int | None, dict]:
    """The last step, and the newest value of each metric."""
    rows = run_files.last_rows(folder / METRICS)
    step = next((row["step"] for row in reversed(rows) if "step" in row), None)
    return step, record.metrics | {k: v for row in rows for k, v in row.items() if k != "step"}


def headline(values: Mapping[str, object]) -> list[dict]:
    """Two or three of a run's most informative metrics; the first three if none is known."""
    known = [name for name in HEADLINES if values.get(name) is not None][:2]
    names = [known[0], f"eval/{known[0]}", *known[1:]] if known else list(values)[:3]
    return [{"name": name, "value": values[name]} for name in names if values.get(name) is not None]


def reported_alarms(text: str) -> list[Alarm]:
    """The alarms in a run's report.md."""
    lines = text.partition("\n## Alarms\n")[2].partition("\n## ")[0].splitlines()
    return [Alarm(*match.groups()) for line in lines if (match := _ALARM.match(line))]


def _header_match(record: Mapping, pattern: re.Pattern) -> str | None:
    """The first group of a pattern in the header lines of a run."""
    lines = _inner(record, "facts").get("header") or []
    return next((match.group(1) for line in lines if (match := pattern.match(line))), None)


def _num_steps(record: Mapping, train: Mapping) -> int | None:
    """The planned number of steps: from the run's header, else from its settings."""
    steps = int(_header_match(record, _RUN_LINE) or train.get("max_steps") or 0)
    return steps if steps > 0 else None


def _seconds(folder: Path, record: Record, status: str) -> float:
    """Seconds that a run has taken, over all its processes: earlier ones from run.json, the current one since it wrote
    its settings."""
    began = mark(folder / SETTINGS)
    if status not in ("running", "lost") or began is None:
        return record.seconds
    last = mark(folder / METRICS)
    until = time.time_ns() if status == "running" else last[2] if last else began[2]
    return round(record.seconds + max(0, until - began[2]) / 1e9, 3)


# -- parents ---------------------------------------------------------------------------------------------------------


def parents_of(run: str, record: Mapping, outputs: Path) -> list[Parent]:
    """The models in a run's settings from which it starts and learns, the trained one first, and runs whose files are
    its data, such as marks."""
    config, facts = _inner(record, "config"), _inner(record, "facts")
    roles, reward = _inner(config, "roles"), _inner(config, "reward")
    role = {name: part.get("model_name_or_path") for name, part in roles.items() if isinstance(part, Mapping)}
    started_from = [_inner(config, "model").get("model_name_or_path"), role.get("actor"), facts.get("base_model"),
                    _header_match(record, _MODEL_LINE)]
    evaluated = [text.partition("=")[2] or text for text in _texts(_inner(config, "evaluate").get("models"))]
    named = [*started_from, *evaluated, role.get("reward"), facts.get("reward_model"), role.get("teacher"),
             role.get("ref"), role.get("critic"), *_texts(reward.get("models")), _inner(reward, "judge").get("model")]
    roots = _roots(run, config.get("output_dir"), outputs)
    preset = _inner(config, "model").get("preset")  # new weights, and no model
    parents = {text: Parent(text, _ids(text, roots)) for text in named if text and text != preset}
    beside = run.rpartition("/")[0] + "/" if "/" in run else ""
    if not any(started_from) and "train" in config and record.get("stage") != "sft":
        parents["sft"] = Parent("sft", (f"{beside}sft",), is_guess=True)
    has_reward = "reward_model" in facts or bool(role.get("reward")) or _has_sources(config, record)
    if "reward" in role and not has_reward:
        parents["reward"] = Parent("reward", (f"{beside}reward",), is_guess=True)
    data = [each.get("path") if isinstance(each, Mapping) else each for each in _listed(_inner(config, "data"))]
    return [*parents.values(), *(Parent(text, _ids(text, roots), is_guess=True) for text in data
                                 if isinstance(text, str) and _INSIDE_RUN.search(text))]


def parent_names(run: str, parents: Iterable[Parent], known: Collection[str]) -> list[str]:
    """The ids of parents that are runs, and the names of others, without `run` itself."""
    names = []
    for parent in parents:
        known_id = next((id_ for id_ in parent.ids if id_ in known), None)
        if known_id is None and not parent.is_guess:
            names.append(parent.text)
        elif known_id is not None and known_id != run:
            names.append(known_id)
    return list(dict.fromkeys(names))


def _roots(run: str, output_dir: object, outputs: Path) -> list[str]:
    """Prefixes of paths of other runs in a record: the outputs folder, and the folder in which the run was made, by its
    own path; "" for a relative one."""
    path = _normal(str(output_dir))
    is_here = path == run or path.endswith(f"/{run}")
    return [f"{outputs}/", *([path[: len(path) - len(run)]] if is_here else [])]


def _ids(text: str, roots: list[str]) -> tuple[str, ...]:
    path = _INSIDE_RUN.sub("", _normal(text))
    return tuple(path[len(root):] for root in roots if path.startswith(root) and not path[len(root):].startswith("/"))


def _normal(path: str) -> str:
    return os.path.normpath(os.path.expanduser(path) if path.startswith("~/") else path)


def _has_sources(config: Mapping, record: Mapping) -> bool:
    """Whether the settings have a source of scores, or the stage needs none."""
    reward = _inner(config, "reward")
    judge = _inner(reward, "judge")
    return bool(reward.get("functions") or reward.get("models") or reward.get("url") or judge.get("model")
                or judge.get("url") or _inner(config, "environment").get("factory")
                or record.get("stage") in ("distill", "evaluate"))


def _listed(data: Mapping) -> list:
    sources = data.get("sources") or []
    return sources if isinstance(sources, list) else [sources]


def _texts(value: str | list[str] | None) -> list[str]:
    """A text or a list of them."""
    return [value] if isinstance(value, str) else value or []


def _inner(section: Mapping, *names: str) -> Mapping:
    for name in names:
        section = section.get(name) or {}
    return section
