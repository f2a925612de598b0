"""The job queue: jobs started from the page run one at a time, in order, in processes that outlive the studio.

All state is in files (job.py). Of several studios on one folder the one that holds the queue's lock starts queued jobs;
the others show them, and one of them takes over when it ends.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import BinaryIO

from hybrid_rlhf.core.own_files import clear_unfinished, fresh_folder, take_lock, write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.studio.job import (
    ENDED,
    FACTS,
    IS_NUMBER,
    MAKES_RUNS,
    OUTPUT,
    SETTINGS,
    Job,
    drop,
    now,
    read_job,
    request_stop,
    start,
)
from hybrid_rlhf.studio.run_files import Mark, mark
from hybrid_rlhf.studio.studio import Refused, Studio, line_of, own_folder, read_json

SHOWN = 100  # newest jobs in the list
LOOK_SECONDS, RETRY_SECONDS = 0.3, 5.0
LAUNCHER = (sys.executable, "-P", "-m", "hybrid_rlhf")  # -P: the current folder may have a package of the same name
_log = logging.getLogger(__name__)


class Jobs:
    """Queued, running and ended jobs below `studio.home`. `open` starts to run the queue, `close` stops it."""

    def __init__(self, studio: Studio) -> None:
        self._studio, self.folder = studio, own_folder(studio, "jobs")
        self._ended: dict[str, Job] = {}  # these no longer change
        self._wake, self._is_closing = threading.Event(), False
        self._queue_lock: BinaryIO | None = None
        self._watchers: list[subprocess.Popen] = []  # started here, and not ended
        self._trouble: str | None = None  # why the next job could not be started
        self._published: tuple[list, dict[str, Mark]] = ([], {})  # states of all jobs; outputs of running ones
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)

    def open(self) -> None:
        """Start the queue."""
        self._thread.start()

    def close(self) -> None:
        """Stop running the queue; jobs continue."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10)
        if self._queue_lock is not None:
            self._queue_lock.close()

    # -- list of jobs --------------------------------------------------------------------------------------------------

    def all(self) -> list[Job]:
        """Newest first: all queued and running jobs, and ended ones among the SHOWN newest."""
        numbers = sorted((name for name in os.listdir(self.folder) if IS_NUMBER.fullmatch(name)), key=int)
        newest, place, jobs = set(numbers[-SHOWN:]), 0, []
        for name in numbers:
            job = self._job(name)
            if job is None or (job.state in ENDED and name not in newest):
                continue
            if job.state == "queued":
                place += 1
                job = replace(job, place=place, error=self._trouble if place == 1 else None)
            jobs.append(job)
        return jobs[::-1]

    def find(self, number: str) -> Job:
        """The job of a number. Raises Refused if there is none."""
        job = next((job for job in self.all() if job.id == number), None)
        if job is None and IS_NUMBER.fullmatch(number):
            job = self._job(number)
        if job is None:
            raise Refused(404, "there is no such job")
        return job

    def of_run(self, run: str) -> Job | None:
        """The queued or running job that makes this run."""
        return next((job for job in self._making(run) if job.state not in ENDED), None)

    def folder_of(self, run: str) -> str | None:
        """The folder in which the job that made this run was started, if it still exists."""
        folder = next((job.facts["folder"] for job in self._making(run)), None)
        return folder if folder and os.path.isdir(folder) else None

    def is_own(self, run: str) -> bool:
        """Whether this studio made the run, so that its user chose the settings."""
        return any(True for _ in self._making(run))

    def _making(self, run: str) -> Iterator[Job]:
        return (job for job in self.all() if job.facts["run"] == run and job.facts["kind"] in MAKES_RUNS)

    def _job(self, name: str) -> Job | None:
        if name in self._ended:
            return self._ended[name]
        facts = read_json(self.folder / name / FACTS)
        if facts is None:
            return None
        job = read_job(self.folder / name, facts)
        if job.state in ENDED:
            self._ended[name] = job
        return job

    # -- requests ------------------------------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no other thread or studio adds, drops or starts a job. Not reentrant."""
        with take_lock(self.folder / "changes.lock"):
            yield

    def add(self, kind: str, title: str, words: Sequence[str], *, stage: str | None = None, run: str | None = None,
            settings: str | None = None, name: str | None = None, folder: str | None = None) -> dict:
        """Queue a process; call within `alone`. words: the launcher's arguments, where SETTINGS stands for the file
        with `settings` (YAML). folder: its working directory, by default the studio's."""
        numbers = [int(name) for name in os.listdir(self.folder) if IS_NUMBER.fullmatch(name)]
        number = f"{max(numbers, default=0) + 1:06d}"
        target = self.folder / number
        self._ended.pop(number, None)  # of a folder that was removed by hand
        command = [*LAUNCHER, *(str(target / SETTINGS) if word == SETTINGS else word for word in words)]
        facts = {"kind": kind, "title": title, "stage": stage, "run": run, "name": name, "created": now(),
                 "words": command, "folder": folder or os.getcwd()}
        clear_unfinished(self.folder)
        with fresh_folder(self.folder) as beside:
            if settings is not None:
                write_file(beside / SETTINGS, settings)
            write_file(beside / FACTS, to_json(facts, indent=1) + "\n")
            beside.rename(target)
        self._changed()
        return self.find(number).shape()

    def stop(self, number: str) -> dict:
        """Cancel a queued job; ask a running one to stop with a checkpoint, or on a second call immediately."""
        with self.alone():
            job = self.find(number)
            folder = self.folder / job.id
            if job.state == "queued":
                drop(folder)
            elif job.state == "running":
                request_stop(folder)
            else:
                raise Refused(409, f"this job has ended ({job.state})")
        self._changed()
        return self.find(number).shape()

    def _changed(self) -> None:
        self._studio.news.publish("jobs", {})
        self._wake.set()

    # -- the thread that runs the queue --------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
                seconds, self._trouble = LOOK_SECONDS, None
            except Exception as error:  # of a full disk, say: it is tried again
                _log.exception("the studio's queue")
                seconds, self._trouble = RETRY_SECONDS, line_of(error)
                self._studio.news.publish("jobs", {})
            self._wake.wait(seconds)
            self._wake.clear()

    def _turn(self) -> None:
        self._watchers = [watcher for watcher in self._watchers if watcher.poll() is None]
        jobs = self.all()
        if self._runs_the_queue() and not any(job.state == "running" for job in jobs):
            waiting = next((job for job in reversed(jobs) if job.state == "queued"), None)
            if waiting is not None:
                self._start(waiting.id)
                jobs = self.all()
        self._publish(jobs)

    def _runs_the_queue(self) -> bool:
        if self._queue_lock is None:
            with suppress(TimeoutError):
                self._queue_lock = take_lock(self.folder / "queue.lock", 0)
        return self._queue_lock is not None

    def _start(self, name: str) -> None:
        with self.alone():
            job = self._job(name)
            if job is not None and job.state == "queued":  # else it was dropped meanwhile
                self._watchers.append(start(self.folder / name))

    def _publish(self, jobs: Sequence[Job]) -> None:
        """Publish to the open tabs the jobs whose state or output has changed."""
        states = [(job.id, job.state, job.started, job.error) for job in jobs]
        marks = {job.id: mark(self.folder / job.id / OUTPUT) for job in jobs if job.state == "running"}
        last_states, last_marks = self._published
        for number in marks.keys() | last_marks.keys():
            if marks.get(number) != last_marks.get(number):
                self._studio.news.publish("job", {"id": number})
        if states != last_states:
            self._studio.news.publish("jobs", {})
        self._published = states, marks
