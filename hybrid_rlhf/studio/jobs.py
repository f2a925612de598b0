"""The queue: what was started from the page runs one at a time, in order, in processes that outlive the studio.

All of it is in files (job_files.py). Of several studios on one folder the one that has the lock of the queue starts
what waits; the others show it, and one of them goes on when that one ends.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.given_paths import expanded
from hybrid_rlhf.core.own_files import clear_unfinished, fresh_folder, whole, write_file
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.studio import file_lock, process_identity
from hybrid_rlhf.studio.job_files import (
    END,
    ENDED,
    FACTS,
    IS_NUMBER,
    LOCK,
    MAKES_RUNS,
    OUTPUT,
    PROCESS,
    SETTINGS,
    STOP,
    STOP_NOW,
    Job,
    last_line,
    now,
    read_facts,
    read_job,
)
from hybrid_rlhf.studio.named_code import module_code
from hybrid_rlhf.studio.studio import Refused, Studio
from hybrid_rlhf.studio.studio_files import own_folder, read_bytes, read_json, refused

LAUNCHER = (sys.executable, "-c", module_code("hybrid_rlhf.__main__", "launch"))
SHOWN = 100  # of the newest jobs
LOOK_SECONDS, AGAIN_SECONDS = 0.3, 5.0
DOUBLE_CLICK_SECONDS, GRACE_SECONDS = 2.0, 10.0
MIN_FREE = 64 * 2**20  # bytes on the disk without which nothing is started
_STRANGE = "it was queued by another user or on another machine, and is not run here; start it again"
_log = logging.getLogger(__name__)


class Jobs:
    """What waits, runs and has ended below `studio.home`. `open` begins to run it, `close` leaves it to the next."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._facts: dict[str, dict] = {}  # written once, so read once
        self._ended: dict[str, Job] = {}
        self._trusted: dict[str, bool] = {}
        self._asked: dict[str, float] = {}  # when a job was asked to stop
        self._mutex, self._wake, self._is_closing = threading.Lock(), threading.Event(), False
        self._queue_lock: int | None = None
        self._watchers: dict[str, subprocess.Popen] = {}  # started here, to be asked for their exit codes
        self._trouble, self._not_before = None, 0.0  # why the next one could not be started, and when it is tried again
        self._told: tuple[object, dict[str, int]] = ((), {})
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)

    def open(self) -> None:
        """UserError where the outputs take no files of the studio's."""
        try:
            self.folder  # noqa: B018 - made
        except Refused as error:
            raise UserError(f"studio: {error}; or give another folder by --outputs") from error
        self._thread.start()

    def close(self) -> None:
        """Ends what runs here, and nothing else: jobs go on."""
        self._is_closing = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(10)
        if self._queue_lock is not None:
            os.close(self._queue_lock)
            self._queue_lock = None

    # What there is.

    @property
    def folder(self) -> Path:
        return own_folder(self._studio, "jobs")

    def all(self) -> list[Job]:
        """The newest first: whatever waits or runs, and SHOWN in all."""
        numbers = sorted((name for name in os.listdir(self.folder) if IS_NUMBER.fullmatch(name)), key=int)
        newest = set(numbers[-SHOWN:])
        for name in self._facts.keys() - set(numbers):  # someone has made room: a later job may get the number
            for known in (self._facts, self._ended, self._trusted, self._asked):
                known.pop(name, None)
        found = [job for name in numbers if (job := self._job(name)) is not None
                 and (job.state not in ENDED or name in newest)]
        place, placed = 0, []
        for job in found:
            if job.state == "queued" and not self._is_trusted(job):
                job = replace(job, error=_STRANGE)
            elif job.state == "queued":
                place += 1
                job = replace(job, place=place, error=self._trouble if place == 1 else None)
            placed.append(job)
        return placed[::-1]

    def find(self, number: object) -> Job:
        """Refused where there is no such job."""
        name = number if isinstance(number, str) and IS_NUMBER.fullmatch(number) else None
        job = next((each for each in self.all() if each.id == name), None) if name else None
        job = job or (self._job(name) if name else None)
        if job is None:
            raise Refused(404, "there is no such job")
        return job

    def of_run(self, run: str) -> Job | None:
        """The job that waits for this run or makes it."""
        return next((job for job in self.all() if job.facts["run"] == run and job.state not in ENDED
                     and job.facts["kind"] in MAKES_RUNS), None)

    def folder_of(self, run: str) -> str | None:
        """Where the job that made this run was started, if one of ours did and the folder is still there."""
        found = next((job.facts["folder"] for job in self._own(run)), None)
        return found if found and os.path.isdir(found) else None

    def is_own(self, run: str) -> bool:
        """Whether this user's studio has made this run: what its settings name, he has named."""
        return any(True for _ in self._own(run))

    def _own(self, run: str) -> Iterator[Job]:
        return (job for job in self.all() if job.facts["run"] == run and job.facts["kind"] in MAKES_RUNS
                and self._is_trusted(job))

    def _job(self, name: str) -> Job | None:
        if name in self._ended:
            return self._ended[name]
        folder = self.folder / name
        facts = self._facts.get(name) or read_facts(folder)
        if facts is None:
            return None
        self._facts[name] = facts
        job = read_job(folder, facts)
        if job.state in ENDED:
            self._ended[name] = job
        return job

    # What is asked.

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else, in this process or another, adds, drops or starts a job meanwhile. Not to be nested."""
        with self._mutex:
            try:
                with file_lock.alone(self.folder / "changes.lock"):
                    yield
            except OSError as error:
                raise refused(error, f"the queue in {self.folder}") from error

    def add(self, kind: str, title: str, words: Sequence[str], *, stage: str | None = None, run: str | None = None,
            settings: str | None = None, name: str | None = None, folder: str | None = None) -> dict:
        """Queue a process; to be called in `alone`. words: the launcher's, in which SETTINGS stands for the file of
        `settings` (YAML). folder: where it starts, and relative paths count from; the studio's own unless given."""
        numbers = [int(each) for each in os.listdir(self.folder) if IS_NUMBER.fullmatch(each)]
        number = f"{max(numbers, default=0) + 1:06d}"
        target = self.folder / number
        command = [*LAUNCHER, *(str(target / SETTINGS) if word == SETTINGS else word for word in words)]
        facts = {"kind": kind, "title": title, "stage": stage, "run": run, "name": name, "created": now(),
                 "words": command, "folder": folder or os.getcwd()}
        facts["mark"] = _mark(facts, settings)
        clear_unfinished(self.folder)
        with fresh_folder(self.folder) as beside:
            if settings is not None:
                write_file(beside / SETTINGS, settings)
            write_file(beside / FACTS, to_json(facts, indent=1) + "\n")
            beside.rename(target)
        self._changed()
        return self.find(number).shape()

    def stop(self, number: object) -> dict:
        """Drop a job that waits; ask one that runs to stop with a checkpoint, and the second time at once."""
        with self.alone():
            job = self.find(number)
            folder = self.folder / job.id
            if job.state == "queued":
                write_file(folder / END, json.dumps({"rc": None, "finished": now()}))
            elif job.state == "running":
                self._ask(folder)
            else:
                raise Refused(409, f"this job has ended ({job.state})")
        self._changed()
        return self.find(number).shape()

    def _ask(self, folder: Path) -> None:
        """Its watcher looks for these files. Where that was killed, or the disk takes no file, the process is told by
        the studio itself."""
        asked = next((name for name in (STOP_NOW, STOP) if (folder / name).exists()), None)
        when = (folder / asked).stat().st_mtime if asked else self._asked.get(folder.name)
        age = 0.0 if when is None else time.time() - when
        if when is not None and age < DOUBLE_CLICK_SECONDS:
            return
        self._asked[folder.name] = time.time()
        is_heard = file_lock.is_held(folder / LOCK)
        try:
            (folder / (STOP if when is None else STOP_NOW)).touch()
        except OSError:
            is_heard = False
        if not is_heard:
            is_deaf = asked == STOP_NOW and age > GRACE_SECONDS
            process = (read_json(folder / PROCESS) or {}).get("process")
            process_identity.send(process, signal.SIGKILL if is_deaf else signal.SIGTERM)

    def _changed(self) -> None:
        self._studio.news.publish("jobs", {})
        self._wake.set()

    # What runs.

    def _run(self) -> None:
        fault: str | None = None
        while not self._is_closing:
            try:
                self._turn()
                fault = None
            except Exception as error:  # whatever is wrong with one look, the next may find it right again
                if repr(error) != fault:  # said once
                    _log.exception("the studio's queue")
                fault = repr(error)
            self._wake.wait(AGAIN_SECONDS if fault else LOOK_SECONDS)
            self._wake.clear()

    def _turn(self) -> None:
        for name, watcher in list(self._watchers.items()):
            if watcher.poll() is not None:
                self._seen_off(name, watcher.returncode)
        found = self.all()
        if self._runs_the_queue() and not any(job.state == "running" for job in found):
            waiting = next((job for job in reversed(found) if job.state == "queued" and job.place), None)
            if waiting is not None and time.monotonic() >= self._not_before:
                self._start(waiting.id)
                found = self.all()
        self._tell(found)

    def _runs_the_queue(self) -> bool:
        path = self.folder / "queue.lock"
        if self._queue_lock is not None and not (
                path.exists() and os.path.samestat(os.fstat(self._queue_lock), path.stat())):
            os.close(self._queue_lock)  # the folder was removed, and this is the lock of nothing
            self._queue_lock = None
        if self._queue_lock is None:
            self._queue_lock = file_lock.take(path)
        return self._queue_lock is not None

    def _seen_off(self, name: str, rc: int) -> None:
        """A watcher has ended; one that could not start its job leaves it waiting."""
        del self._watchers[name]
        if rc and not (self.folder / name / PROCESS).exists():
            self._delay(last_line(self.folder / name / OUTPUT) or "error: the job could not be started")

    def _delay(self, line: str) -> None:
        self._trouble, self._not_before = line.removeprefix("error: "), time.monotonic() + AGAIN_SECONDS

    def _start(self, name: str) -> None:
        """Under a watcher that inherits the lock of the job's folder: from here on everyone sees it run."""
        with self.alone():
            job = self._job(name)
            if job is None or job.state != "queued":
                return
            folder = self.folder / name
            lock = file_lock.take(folder / LOCK)
            if lock is None:  # somebody looks at it at this moment
                return
            try:
                self._watchers[name] = _started(folder, lock)
                self._trouble = None
            except OSError as error:
                self._delay(str(refused(error, "the job cannot be started")))
            finally:
                os.close(lock)

    def _tell(self, found: Sequence[Job]) -> None:
        """The open tabs of what has changed since the last look."""
        states = [(job.id, job.state, job.started, job.error) for job in found]
        sizes = {}
        for job in found:
            if job.state == "running" or (job.id in self._told[1] and job.state in ENDED):
                with suppress(OSError):
                    sizes[job.id] = (self.folder / job.id / OUTPUT).stat().st_size
        for number, size in sizes.items():
            if self._told[1].get(number) != size:
                self._studio.news.publish("job", {"id": number})
        if states != self._told[0]:
            self._studio.news.publish("jobs", {})
        running = {job.id for job in found if job.state == "running"}
        self._told = states, {number: size for number, size in sizes.items() if number in running}

    def _is_trusted(self, job: Job) -> bool:
        """Whether this user queued it here: settings may name code that is run, and folders come from strangers too."""
        if job.id not in self._trusted:
            facts = {name: value for name, value in job.facts.items() if name != "mark"}
            mark = _mark(facts, read_bytes(self.folder / job.id / SETTINGS))
            self._trusted[job.id] = hmac.compare_digest(mark.encode(), job.facts["mark"].encode())
        return self._trusted[job.id]


def _started(folder: Path, lock: int) -> subprocess.Popen:
    free = os.statvfs(folder)
    if free.f_bavail * free.f_frsize < MIN_FREE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        return subprocess.Popen([sys.executable, "-m", "hybrid_rlhf.studio.job_process", str(folder), str(lock)],
                                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=(lock,), cwd="/",
                                start_new_session=True, env=_environment())
    finally:
        os.close(output)


def _environment() -> dict[str, str]:
    """The studio's, in which the package is found from any folder: a checkout may not be installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "training" / "step1_sft").is_dir():
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


def _mark(facts: Mapping[str, object], settings: str | bytes | None) -> str:
    """What only this user's studios can write under a job."""
    text = settings.encode() if isinstance(settings, str) else settings or b""
    content = json.dumps(dict(facts), sort_keys=True).encode() + b"\0" + text
    return hmac.new(_key(), content, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's, made at its first use: studio.key in the cache folder ($HYBRID_RLHF_CACHE or ~/.cache/hybrid_rlhf).
    """
    path = Path(expanded(os.environ.get("HYBRID_RLHF_CACHE") or "~/.cache/hybrid_rlhf"), "studio.key")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole(path) as (beside,):
                os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                beside.write_bytes(secrets.token_bytes(32))
        return path.read_bytes()
    except OSError as error:
        raise refused(error, f"the studio's key {path}") from error
