"""A job's folder, .studio/jobs/NUMBER, and what its files say of it. Whoever reads them sees the same, whichever
studio started the job and whether one was there when it ended.

job.json: what it is, written once. settings.yaml: of a stage. out.log: what its process says. lock: held by its watcher
(job_process.py) as long as that lives. process.json: the watcher and the process, by number and time of start. stop,
stop_now: what was asked of it. end.json: the exit code.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hybrid_rlhf.core.text_safety import escape_control, shortened
from hybrid_rlhf.studio import file_lock, process_identity
from hybrid_rlhf.studio.studio_files import read_bytes, read_json

FACTS, SETTINGS, LOCK, OUTPUT, PROCESS = "job.json", "settings.yaml", "lock", "out.log", "process.json"
STOP, STOP_NOW, END = "stop", "stop_now", "end.json"
KINDS = ("train", "signal", "evaluate", "export")
MAKES_RUNS = ("train", "evaluate")
ENDED = ("done", "failed", "stopped", "lost")
MOST_OUTPUT = 2**16  # bytes of the output in one answer
IS_NUMBER = re.compile(r"[0-9]{6,12}")
_TEXTS = ("title", "created", "folder", "mark")  # of job.json
_MAYBE = ("stage", "run", "name")  # text or null
_LOST = "how it ended is not known: it was ended together with its watcher, or the machine was"


@dataclass(frozen=True)
class Job:
    """facts: job.json (kind, title, stage, run, created; words: the process's command line; folder: where it starts;
    name: of an export; mark: who queued it). started, finished: UTC, ISO 8601. rc: the exit code, negative for a
    signal. error: one line of why it failed, or of why it waits."""

    id: str
    facts: dict
    state: str
    started: str | None = None
    finished: str | None = None
    rc: int | None = None
    error: str | None = None
    place: int | None = None

    def shape(self) -> dict:
        """As the page reads it."""
        said = {name: self.facts[name] for name in ("kind", "title", "stage", "run", "name", "created")}
        return {"id": self.id, **said, "state": self.state, "started": self.started, "finished": self.finished,
                "rc": self.rc, "error": self.error, "place": self.place}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def read_facts(folder: Path) -> dict | None:
    """job.json, None where it is not whole or not one of ours."""
    found = read_json(folder / FACTS) or {}
    is_ours = found.get("kind") in KINDS and all(isinstance(found.get(name), str) for name in _TEXTS) and all(
        name in found and isinstance(found[name], (str, type(None))) for name in _MAYBE)
    words = found.get("words")
    return found if is_ours and isinstance(words, list) and words and all(isinstance(w, str) for w in words) else None


def read_job(folder: Path, facts: dict) -> Job:
    """The job as it stands now; queued ones without their place."""
    job = _read(folder, facts)
    # It may have started or ended between two looks at its files; none of that takes it from lost to something else
    # twice, for whoever has a process.json has taken the lock before.
    return _read(folder, facts) if job.state == "lost" else job


def _read(folder: Path, facts: dict) -> Job:
    job = Job(folder.name, facts, "queued")
    is_held = file_lock.is_held(folder / LOCK)
    end, process = read_json(folder / END), read_json(folder / PROCESS)
    started = _text((process or {}).get("started"))
    if end is not None:
        return _ended(folder, replace(job, started=started, finished=_text(end.get("finished"))), end.get("rc"))
    if is_held or _is_alive(process):
        return replace(job, state="running", started=started)
    return job if process is None else replace(job, state="lost", started=started, error=_LOST)


def _is_alive(process: dict | None) -> bool:
    return any(process_identity.is_alive((process or {}).get(name)) for name in ("watcher", "process"))


def _ended(folder: Path, job: Job, rc: object) -> Job:
    """The state that an exit code means. 130: stopped with a checkpoint, by whoever it was."""
    if rc == 0:
        return replace(job, state="done", rc=0)
    if not isinstance(rc, int):  # it never began
        return replace(job, state="stopped")
    was_asked = (folder / STOP).exists()
    if rc == 130 or (rc < 0 and was_asked):
        return replace(job, state="stopped", rc=rc)
    line = _by_signal(-rc) if rc < 0 else last_line(folder / OUTPUT)
    return replace(job, state="failed", rc=rc, error=line or f"it ended with exit code {rc} and said nothing")


def _by_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = "; the system does that where memory runs out" if number == signal.SIGKILL else ""
    return f"its process was ended by {name}{hint}"


def _text(value: object) -> str | None:
    return value[:40] if isinstance(value, str) else None


def last_line(path: Path) -> str | None:
    """The last line that says something, safe to show."""
    try:
        size = path.stat().st_size
    except OSError:
        return None
    lines = _plain(read_bytes(path, max(0, size - MOST_OUTPUT), MOST_OUTPUT) or b"").splitlines()
    return next((shortened(line.strip()) for line in reversed(lines) if line.strip()), None)


def read_output(path: Path, after: int | None) -> tuple[str, int]:
    """Output from the byte `after` on, at most MOST_OUTPUT bytes of it, and where the next begins; without `after` the
    newest, from the beginning of a line. A character that is not yet whole is left for the next."""
    try:
        size = path.stat().st_size
    except OSError:
        return "", 0
    start = max(0, size - MOST_OUTPUT) if after is None else min(after, size)
    raw = read_bytes(path, start, MOST_OUTPUT) or b""
    raw = raw[:len(raw) - _unfinished(raw)]
    end = start + len(raw)
    if after is None and start:
        raw = raw[raw.find(b"\n") + 1:]
    return _plain(raw), end


def _unfinished(raw: bytes) -> int:
    """Bytes at the end that begin a character of UTF-8 and are not all of it."""
    for length in range(1, min(4, len(raw) + 1)):
        byte = raw[-length]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4 if byte <= 0xF4 else 1  # none begins with more
            return length if length < needed else 0
        if byte < 0x80:
            return 0
    return 0


def _plain(raw: bytes) -> str:
    """Text without what steers terminals; a progress bar that is drawn again becomes lines."""
    return escape_control(raw.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n"))
