"""What the page asks before a run is started, answered by a process of its own: the studio's imports no torch.

That process is killed where it has no answer within two minutes, takes more than 2 GiB or is needed no more, and is
started again by the next question. A newer question takes the place of one of its kind that still waits.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from hybrid_rlhf.studio.look_process import LIGHT
from hybrid_rlhf.studio.studio import Refused

SECONDS, BYTES = 120.0, 2 << 30
IDLE, IDLE_ON_CARD = 600.0, 15.0  # seconds; what a card's driver keeps for the process is missing to a run
_START = ("import sys; sys.path[:] = sys.argv[1:]; "  # not the folder that the studio was started in
          "from hybrid_rlhf.studio.look_process import main; main()")
_log = logging.getLogger(__name__)


@dataclass
class _Asked:
    kind: str
    key: str
    asked: dict
    number: int
    is_replaced: bool = False
    deadline: float = 0.0
    reply: dict | None = None

    @property
    def lane(self) -> bool:
        return self.kind in LIGHT


@dataclass
class _Child:
    """The process. culprit: the question that it was killed for; why: in words."""

    process: subprocess.Popen
    has_ended: bool = False
    holds_card: bool = False
    culprit: _Asked | None = None
    why: str = ""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, asked: _Asked) -> None:
        text = json.dumps({"number": asked.number, "kind": asked.kind, "asked": asked.asked})
        assert self.process.stdin is not None
        with self.sending, suppress(OSError, ValueError):  # it has ended: whoever waits is told
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def kill(self, why: str, culprit: _Asked | None = None) -> None:
        self.why, self.culprit = why, culprit
        if self.has_ended:  # its number may be another's by now
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Look:
    """Questions to the process. Any thread may ask; two questions are answered at a time, one of LIGHT and another."""

    def __init__(self, seconds: float = SECONDS, most_bytes: int = BYTES, idle: float = IDLE, start: str = _START
                 ) -> None:
        """start: the program of the process, which is given the paths of modules."""
        self._seconds, self._most_bytes, self._idle, self._code = seconds, most_bytes, idle, start
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: dict[str, _Asked] = {}
        self._busy: dict[bool, _Asked] = {}
        self._child: _Child | None = None
        self._last, self._is_closed = time.monotonic(), False

    def ask(self, kind: str, asked: dict, key: str | None = None) -> dict:
        """The answer. key: questions of one key take each other's place (their kind). Raises Refused: 409 for a
        question that a newer one has replaced, 400 for what is the asker's fault, 503 and 504 where the process ended
        or took too long."""
        mine = _Asked(kind, key or kind, asked, next(self._numbers))
        self._take_turn(mine)
        try:
            for _ in range(2):  # a second time where the process ended for another question's sake
                child = self._send(mine)
                with self._changed:
                    self._changed.wait_for(lambda child=child: mine.reply is not None or child.has_ended)
                if mine.reply is not None or child.culprit is mine or not (child.why or mine.lane):
                    break
        finally:
            with self._changed:
                self._busy.pop(mine.lane, None)
                self._last = time.monotonic()
                self._changed.notify_all()
        return _answer(mine, child)

    def close(self) -> None:
        """End the process; nothing is answered any more."""
        with self._changed:
            self._is_closed = True
            if self._child is not None:
                self._child.kill("the studio ends")
            self._changed.notify_all()

    def _take_turn(self, mine: _Asked) -> None:
        with self._changed:
            if mine.key in self._waiting:
                self._waiting[mine.key].is_replaced = True
            self._waiting[mine.key] = mine
            self._changed.notify_all()
            self._changed.wait_for(lambda: mine.is_replaced or self._is_closed or mine.lane not in self._busy)
            if mine.is_replaced:
                raise Refused(409, "replaced")
            del self._waiting[mine.key]
            if not self._is_closed:
                self._busy[mine.lane] = mine

    def _send(self, mine: _Asked) -> _Child:
        with self._changed:
            if self._is_closed:
                raise Refused(503, "the studio ends")
            if self._child is None or self._child.has_ended or self._child.why:
                self._child = self._start()
            mine.deadline = time.monotonic() + self._seconds
            child = self._child
        child.send(mine)
        return child

    def _start(self) -> _Child:
        child = _Child(subprocess.Popen(
            [sys.executable, "-c", self._code, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True))
        for act in (self._read, self._watch):
            threading.Thread(target=act, args=(child,), daemon=True).start()
        return child

    def _read(self, child: _Child) -> None:
        """Hand out replies until the process ends."""
        assert child.process.stdout is not None
        for line in child.process.stdout:
            try:
                reply = json.loads(line)
            except ValueError:  # half a line of one that was killed
                continue
            with self._changed:
                child.holds_card = bool(reply.get("holds_card"))
                for asked in self._busy.values():
                    if asked.number == reply["number"]:
                        asked.reply = reply
                self._changed.notify_all()
        child.process.wait()
        with self._changed:
            child.has_ended = True
            self._changed.notify_all()

    def _watch(self, child: _Child) -> None:
        """Kill the process where it takes too long or too much, or is needed no more."""
        while not child.has_ended and not child.why:
            time.sleep(0.25)
            with self._changed:
                busy, now = [*self._busy.values()], time.monotonic()
                late = next((asked for asked in busy if asked.reply is None and now > asked.deadline > 0), None)
                idle = now - self._last
                heavy = next((asked for asked in busy if not asked.lane), next(iter(busy), None))
                if late is not None:
                    child.kill(f"no answer within {self._seconds:g} seconds", late)
                elif _bytes_of(child.process.pid) > self._most_bytes:
                    child.kill(f"it takes more than {self._most_bytes / 2**30:g} GiB of memory", heavy)
                elif not busy and not self._waiting and idle > (IDLE_ON_CARD if child.holds_card else self._idle):
                    child.kill("not needed")


def _bytes_of(pid: int) -> int:
    """Memory of a process that no file is behind; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration, ValueError):
        return 0


def _answer(asked: _Asked, child: _Child) -> dict:
    if asked.reply is None:
        status = 504 if "seconds" in child.why else 503
        why = child.why or f"the process that looks ended (code {child.process.returncode})"
        raise Refused(status, f"{why}; the command line has no such bounds: hybrid-rlhf --stage ... --config FILE"
                      + (f" --{asked.kind}" if asked.kind in ("preview", "plan") else ""))
    error = asked.reply.get("error")
    if error is None:
        return asked.reply["answer"]
    if "traceback" in error:
        _log.error("a question of the studio's page failed\n%s", error["traceback"])
    raise Refused(error["status"], error["text"], error["option"])
