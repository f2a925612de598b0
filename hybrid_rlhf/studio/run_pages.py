"""Routes for the pages of runs: the list, details of one run, a comparison of several, and change events."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from hybrid_rlhf.report.metric_names import meaning
from hybrid_rlhf.report.plots import SUBJECTS
from hybrid_rlhf.studio import run_files
from hybrid_rlhf.studio.example import hints
from hybrid_rlhf.studio.run_files import GROWING, MODEL, PAGE, RECORD, SETTINGS
from hybrid_rlhf.studio.run_history import Histories, Metrics, curves, newest_answers, samples, with_pictures
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.settings_text import flat
from hybrid_rlhf.studio.studio import News, Refused, Route, Studio, read_json

PHASES = ("generate", "score", "teacher", "train", "switch")  # disjoint phases of a step
MAX_PROMPTS, MAX_OPTIONS = 50, 300
NO_MATTER = ("output_dir", "resume", "report_to")  # settings without influence on the result
# fields whose change updates the list; not steps and sizes, which change all the time
_OF_THE_LIST = ("id", "stage", "status", "max_steps", "parents", "alarms", "has_model", "error")
# A report contains text of models: inline images and styles are allowed, scripts are not.
_REPORT_HEADERS = {"content-security-policy": "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'",
                   "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}
_log = logging.getLogger(__name__)


def open_runs(studio: Studio, runs: RunList, histories: Histories) -> tuple[list[Route], Callable[[], None]]:
    """Start the watcher; returns the routes and a function that stops it."""
    watcher = Watcher(runs, studio.news)

    async def report(request: Request) -> Response:
        page = studio.folder(request.query_params["id"]) / PAGE
        if not page.is_file():
            raise Refused(404, "this run has no report yet")
        return FileResponse(page, media_type="text/html", headers=_REPORT_HEADERS)

    def of_run(answer: Callable[[Path, dict], dict]) -> Callable:
        return lambda query, _body: answer(studio.folder(query["id"]), query)

    watcher.start()
    return [Route("GET", "/api/runs", lambda _query, _body: runs.answer()),
            Route("GET", "/api/run", lambda query, _body: details(runs, histories, query["id"])),
            Route("GET", "/api/history", of_run(lambda folder, query: curves(histories, folder, query))),
            Route("GET", "/api/samples", of_run(lambda folder, query: samples(histories, folder, query))),
            Route("GET", "/api/compare", lambda query, _body: compare(runs, histories, query["ids"])),
            Route("GET", "/api/report", report, is_raw=True)], watcher.stop


# -- one run ---------------------------------------------------------------------------------------------------------


def details(runs: RunList, histories: Histories, run: str) -> dict:
    """GET /api/run."""
    row, alarms, rows = runs.row(run), runs.alarms(run), runs.rows()[0]
    folder = runs.outputs / run
    record = read_json(folder / RECORD) or {}
    children = [other["id"] for other in rows if run in other["parents"]]
    known = [other["id"] for other in rows if other["id"] in (*row["parents"], *children)]  # runs with a page
    return {"row": row, "children": children, "known": known, "command": record.get("command") or "",
            "header": (record.get("facts") or {}).get("header") or [],
            "settings": run_files.read_text(folder / SETTINGS) or "", "hints": hints(record),
            "versions": record.get("versions") or {}, "own_samples": (record.get("facts") or {}).get("own_samples"),
            "alarms": [{"name": alarm.name, "text": alarm.text} for alarm in alarms],
            **histories.metrics(folder, _measured),
            "checkpoints": [checkpoint._asdict() for checkpoint in run_files.checkpoints(folder)],
            "has_report": (folder / PAGE).is_file(),
            "card": run_files.read_text(folder / MODEL / "README.md"),
            "evaluation": run_files.read_text(folder / run_files.EVALUATION)}


def _measured(metrics: Metrics) -> dict:
    """Seconds by phase, memory peaks, and the available metrics."""
    names = metrics.names
    times = {name: metrics.total(f"time/{name}") for name in PHASES if f"time/{name}" in names}
    rest = metrics.total("time/step") - sum(times.values())
    if rest > 0:
        times["other" if times else "step"] = rest
    peaks = [name for name in names if name.startswith("memory/") and name.count("/") == 2]
    return {"phases": [{"name": name, "seconds": round(seconds, 3)} for name, seconds in times.items()],
            "memory": [{"name": name.removeprefix("memory/"), "bytes": int(metrics.highest(name))} for name in peaks],
            "metrics": described(names), "notes": metrics.notes}


def described(names: Iterable[str]) -> list[dict]:
    """Metrics with their meaning and display group."""
    return [{"name": name, "meaning": meaning(name), "group": group(name)} for name in names]


def group(name: str) -> str:
    """The metric's subject in the report's plots, else the first part of its name."""
    plain = name.removeprefix("eval/")
    for subject in SUBJECTS:
        if any(re.fullmatch(pattern, plain) for pattern in subject.names):
            return subject.title
    return plain.partition("/")[0] if "/" in plain else "other"


# -- several runs ----------------------------------------------------------------------------------------------------


def compare(runs: RunList, histories: Histories, ids: str) -> dict:
    """GET /api/compare: ids is a,b,c."""
    rows = [runs.row(name) for name in ids.split(",")]
    folders = [runs.outputs / row["id"] for row in rows]
    settings = [flat((read_json(folder / RECORD) or {}).get("config") or {}) for folder in folders]
    metrics = [name for folder in folders for name in histories.metrics(folder, lambda metrics: metrics.names)]
    answers = [with_pictures(newest_answers(folder)) for folder in folders]
    return {"runs": rows, "differ": differing(settings), "prompts": side_by_side(answers),
            "metrics": described(dict.fromkeys(metrics))}


def differing(settings: Sequence[dict]) -> list[dict]:
    """The options that differ between the runs that have them, with their values; null if a run has none."""
    rows = []
    for option in dict.fromkeys(option for options in settings for option in options):
        values = [options[option] for options in settings if option in options]
        if option not in NO_MATTER and any(value != values[0] for value in values[1:]):
            rows.append({"option": option, "values": [options.get(option) for options in settings]})
    return rows[:MAX_OPTIONS]


def side_by_side(answers: Sequence[list[dict]]) -> list[dict]:
    """Each prompt with the answer of every run, or None; prompts answered by most runs come first. A reward model's two
    responses to a prompt are two rows, by their side."""
    table: dict[tuple[str, ...], list[dict | None]] = {}
    for place, rows in enumerate(answers):
        for row in rows:
            key = tuple(str(row.get(name, "")) for name in ("prompt", "side", "images"))
            table.setdefault(key, [None] * len(answers))[place] = row
    order = sorted(table.items(), key=lambda item: sum(answer is None for answer in item[1]))
    return [{"prompt": prompt, "answers": row} for (prompt, *_), row in order[:MAX_PROMPTS]]


# -- events ----------------------------------------------------------------------------------------------------------


class Watcher:
    """A thread that polls the files of runs. It publishes `run` {"id", "step"} when those of a running run have
    changed, and `runs` {} when the list has changed."""

    def __init__(self, runs: RunList, news: News) -> None:
        self._runs, self._news = runs, news
        self._end = threading.Event()
        self._list: list | None = None
        self._running: dict[str, list[run_files.Mark]] = {}
        self._thread = threading.Thread(target=self._watch, name="studio-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for it."""
        self._end.set()
        self._thread.join(10)

    def _watch(self) -> None:
        for turn in count():
            try:
                if turn % 5 == 0:
                    self.look_at_all()
                else:
                    self.look_at_running()
            except Exception:  # an error in one poll must not end the thread
                _log.exception("the watcher of runs failed, and goes on")
            if self._end.wait(1):
                return

    def look_at_all(self) -> None:
        """Poll all runs, and update which of them are running."""
        self.look_at_running()
        rows, _ = self._runs.rows()
        now = [[row[name] for name in _OF_THE_LIST] for row in rows]
        running = [row["id"] for row in rows if row["status"] == "running"]
        self._running = {run: self._running.get(run) or self._marks(run) for run in running}
        if self._list is not None and now != self._list:
            self._news.publish("runs", {})
        self._list = now

    def look_at_running(self) -> None:
        """Poll the runs that were running at the last poll of all."""
        for run, before in list(self._running.items()):
            now = self._marks(run)
            if now == before:
                continue
            self._running[run] = now
            try:
                row = self._runs.row(run)
            except Refused:  # it was removed
                del self._running[run]
                continue
            self._news.publish("run", {"id": run, "step": row["step"]})
            if row["status"] != "running":
                del self._running[run]
                self._news.publish("runs", {})

    def _marks(self, run: str) -> list[run_files.Mark]:
        return [run_files.mark(self._runs.outputs / run / name) for name in GROWING]
