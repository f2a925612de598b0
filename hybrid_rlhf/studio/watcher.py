"""What tells open pages that runs have changed: one thread that looks at the files of running runs and at the list."""

from __future__ import annotations

import logging
import threading
import time

from hybrid_rlhf.studio.run_files import ANSWERS, METRICS, RECORD, SAMPLES, Mark, mark
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import News, Refused

FILES = (RECORD, METRICS, SAMPLES, ANSWERS)
EACH, TREE = 1.0, 5.0  # seconds between two looks at running runs, and at all
# what makes another list; steps and sizes, which grow all the time, do not
_OF_THE_LIST = ("id", "stage", "status", "max_steps", "parents", "alarms", "has_model", "error")
_log = logging.getLogger(__name__)


class Watcher:
    """Publishes `run` {"id", "step"} when the files of a running run have grown, and `runs` {} when the list is
    another. each, tree: seconds between two looks at running runs, and at all."""

    def __init__(self, runs: RunList, news: News, each: float = EACH, tree: float = TREE) -> None:
        self._runs, self._news, self._each, self._every = runs, news, each, tree
        self._end = threading.Event()
        self._list: list | None = None
        self._running: dict[str, list[Mark]] = {}
        self._thread = threading.Thread(target=self._watch, name="studio-watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when it has ended."""
        self._end.set()
        self._thread.join(10)

    def _watch(self) -> None:
        looked = -self._every
        while not self._end.is_set():
            try:
                if time.monotonic() - looked >= self._every:
                    self.look_at_all()
                    looked = time.monotonic()
                else:
                    self.look_at_running()
            except Exception:  # whatever other people's files hold, the page goes on
                _log.exception("the watcher of runs failed, and goes on")
            self._end.wait(self._each)

    def look_at_all(self) -> None:
        """The whole list, and which of them are running."""
        self.look_at_running()
        rows, _ = self._runs.rows()
        now = [[row[name] for name in _OF_THE_LIST] for row in rows]
        running = [row["id"] for row in rows if row["status"] == "running"]
        self._running = {run: self._running.get(run) or self._marks(run) for run in running}
        if self._list is not None and now != self._list:
            self._news.publish("runs", {})
        self._list = now

    def look_at_running(self) -> None:
        """Those that were running at the last look at all."""
        for run, before in list(self._running.items()):
            now = self._marks(run)
            if now == before:
                continue
            self._running[run] = now
            try:
                row = self._runs.row(run)
            except Refused:  # it has gone
                del self._running[run]
                continue
            self._news.publish("run", {"id": run, "step": row["step"]})
            if row["status"] != "running":
                del self._running[run]
                self._news.publish("runs", {})

    def _marks(self, run: str) -> list[Mark]:
        return [mark(self._runs.outputs / run / name) for name in FILES]
