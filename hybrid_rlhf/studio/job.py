"""One job: the files of its folder, its state derived from them, and the watcher process that runs it.

    python -m hybrid_rlhf.studio.job FOLDER

A job is a folder .studio/jobs/NUMBER, so every studio on it sees the same state, whichever studio started the job.
job.json: its description, written once. settings.yaml: of a stage. out.log: output of its process. process.json: the
job was started, by its watcher and process (pid and start time). stop, stop_now: requests. end.json: the exit code.

The watcher and the process are in separate sessions, so that they survive the end of the terminal and of the studio.
The watcher starts the process, passes on requests and writes the exit code.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from hybrid_rlhf.core.errors import escape_control, shortened
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.studio.studio import read_json

FACTS, SETTINGS, OUTPUT, PROCESS = "job.json", "settings.yaml", "out.log", "process.json"
STOP, STOP_NOW, END = "stop", "stop_now", "end.json"
MAKES_RUNS = ("train", "evaluate")  # kinds of jobs, beside signal, export and replay
ENDED = ("done", "failed", "stopped", "lost")
MAX_OUTPUT = 2**16  # bytes of the output in one answer
IS_NUMBER = re.compile(r"[0-9]{6,12}")
_POLL_SECONDS, GRACE_SECONDS, DOUBLE_CLICK_SECONDS = 0.2, 10.0, 2.0
_SAME_START = 2.0  # seconds; tolerance when comparing start times of a process
_LOST = "how it ended is not known: it was ended together with its watcher, or the machine was"


@dataclass(frozen=True)
class Job:
    """facts: job.json (kind, title, stage, run, created; words: the command line; folder: where it starts; name: of an
    export). state: queued, running or one of ENDED. started, finished: UTC, ISO 8601. rc: the exit code, negative for a
    signal. error: one line of why it failed or why it waits. place: in the queue."""

    id: str
    facts: dict
    state: str
    started: str | None = None
    finished: str | None = None
    rc: int | None = None
    error: str | None = None
    place: int | None = None

    def shape(self) -> dict:
        """As JSON for the page."""
        facts = {name: self.facts.get(name) for name in ("kind", "title", "stage", "run", "name", "created")}
        return {"id": self.id, **facts, "state": self.state, "started": self.started, "finished": self.finished,
                "rc": self.rc, "error": self.error, "place": self.place}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# -- processes -------------------------------------------------------------------------------------------------------


def process_note(pid: int) -> dict:
    """A process for process.json: pid and start time, since pids are reused. psutil.Error if it has ended."""
    return {"pid": pid, "began": psutil.Process(pid).create_time()}


def find_process(note: object) -> psutil.Process | None:
    """The process described by `process_note`, if it still runs."""
    try:
        process = psutil.Process(note["pid"])  # type: ignore[index]
        is_same = abs(process.create_time() - note["began"]) < _SAME_START  # type: ignore[index]
        return process if is_same and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, KeyError, TypeError, ValueError):
        return None


# -- state -----------------------------------------------------------------------------------------------------------


def read_job(folder: Path, facts: dict) -> Job:
    """The current state of a job; without the place of a queued one."""
    note = read_json(folder / PROCESS)
    processes = [find_process((note or {}).get(name)) for name in ("watcher", "process")]
    end = read_json(folder / END)  # read last: it is written before the watcher ends
    job = Job(folder.name, facts, "queued", started=(note or {}).get("started"))
    if end is not None:
        return _ended(folder, replace(job, finished=end.get("finished")), end.get("rc"))
    if any(processes):
        return replace(job, state="running")
    return job if note is None else replace(job, state="lost", error=_LOST)


def _ended(folder: Path, job: Job, rc: int | None) -> Job:
    """The state for an exit code. 130: stopped with a checkpoint."""
    if rc == 0:
        return replace(job, state="done", rc=0)
    if rc is None:  # dropped before it started
        return replace(job, state="stopped")
    if rc == 130 or (rc < 0 and (folder / STOP).exists()):
        return replace(job, state="stopped", rc=rc)
    line = _by_signal(-rc) if rc < 0 else last_line(folder / OUTPUT)
    return replace(job, state="failed", rc=rc, error=line or f"it ended with exit code {rc} and said nothing")


def _by_signal(number: int) -> str:
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    hint = "; the system does that where memory runs out" if number == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


# -- output ----------------------------------------------------------------------------------------------------------


def last_line(path: Path) -> str | None:
    """The last non-empty line, escaped and shortened for display."""
    lines = read_output(path, None)[0].splitlines()
    return next((shortened(line.strip()) for line in reversed(lines) if line.strip()), None)


def read_output(path: Path, after: int | None) -> tuple[str, int]:
    """At most MAX_OUTPUT bytes of output from the byte `after` on, and the start of the next piece; without `after` the
    newest ones, from the beginning of a line. An incomplete character is left for the next piece."""
    if not path.exists():
        return "", 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - MAX_OUTPUT) if after is None else min(after, size))
        raw = file.read(MAX_OUTPUT)
    end = start + len(raw)
    if after is None and start:
        raw = raw[raw.find(b"\n") + 1:]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(raw)
    # redrawn progress bars become lines
    plain = escape_control(text.replace("\r\n", "\n").replace("\r", "\n"))
    return plain, end - len(decoder.getstate()[0])


# -- requests of the queue -------------------------------------------------------------------------------------------


def start(folder: Path) -> subprocess.Popen:
    """Start the watcher of a queued job. It begins when its input is closed, and only if process.json was written: so a
    job is started once."""
    with (folder / OUTPUT).open("ab") as output:
        watcher = subprocess.Popen([sys.executable, "-m", "hybrid_rlhf.studio.job", str(folder)],
                                   stdin=subprocess.PIPE, stdout=output, stderr=output, cwd="/",
                                   start_new_session=True, env=_environment())
    with watcher.stdin:
        note = {"started": now(), "watcher": process_note(watcher.pid), "process": None}
        write_file(folder / PROCESS, json.dumps(note))
    return watcher


def drop(folder: Path) -> None:
    """Cancel a queued job."""
    _write_end(folder, None)


def request_stop(folder: Path) -> None:
    """Ask a running job to stop with a checkpoint, or on a second request immediately, by a file that its watcher
    polls. If the watcher was killed, signal the process directly."""
    last = next((folder / name for name in (STOP_NOW, STOP) if (folder / name).exists()), None)
    if last and time.time() - last.stat().st_mtime < DOUBLE_CLICK_SECONDS:
        return
    (folder / (STOP_NOW if last else STOP)).touch()
    note = read_json(folder / PROCESS) or {}
    process = find_process(note.get("process"))
    if process is not None and find_process(note.get("watcher")) is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL if last else signal.SIGTERM)


def _environment() -> dict[str, str]:
    """The studio's environment, with this package on PYTHONPATH: a checkout may not be installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "training" / "step1_sft").is_dir():
        return dict(os.environ)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}


# -- the watcher -----------------------------------------------------------------------------------------------------


def watch(folder: Path) -> None:
    """Run the job's process from start to end."""
    sys.stdin.read()
    facts, note = json.loads((folder / FACTS).read_bytes()), read_json(folder / PROCESS)
    if note is None:  # the studio was killed, or the disk is full
        return
    try:
        process = subprocess.Popen(facts["words"], cwd=facts["folder"], stdin=subprocess.DEVNULL,
                                   start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    except OSError as error:  # the folder was removed
        print(f"error: cannot start in {facts['folder']}: {error.strerror}", flush=True)
        _write_end(folder, 2)
        return
    with contextlib.suppress(OSError, psutil.Error):  # for studios, if the watcher is killed
        write_file(folder / PROCESS, json.dumps({**note, "process": process_note(process.pid)}))
    _write_end(folder, _wait(folder, process))


def _wait(folder: Path, process: subprocess.Popen) -> int:
    """Wait for the exit code. Each request sends one SIGTERM: at the first a run saves a checkpoint, at the second it
    ends at once; a process that survives both is killed with its children."""
    num_requests, deadline = 0, float("inf")
    while process.poll() is None:
        for number, name in enumerate((STOP, STOP_NOW), start=1):
            if num_requests < number and (folder / name).exists():
                num_requests = number
                process.send_signal(signal.SIGTERM)
                deadline = time.monotonic() + GRACE_SECONDS if number == 2 else deadline
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return process.returncode


def _write_end(folder: Path, rc: int | None) -> None:
    write_file(folder / END, json.dumps({"rc": rc, "finished": now()}))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process receives them itself; the watcher ends
        signal.signal(number, lambda *_: None)  # with it. A handler, since an ignored signal would be inherited
    watch(Path(sys.argv[1]))
