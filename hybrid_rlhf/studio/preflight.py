"""Questions of the page before a run starts: goals, options, settings file, data, preview and memory plan.

The studio's own process does not import torch: `Look` asks a child process, whose entry point is `main`: JSON lines in,
{"number", "kind", "asked"}, and JSON lines out, {"number", "answer" or "error", "holds_card"}. It is killed if it takes
more than two minutes or 2 GiB, or is no longer needed, and restarted by the next question. A newer question replaces a
waiting one of its kind.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TextIO

import psutil

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.memory_plan.presets import CARDS
from hybrid_rlhf.studio.goals import BUILTIN_REWARDS, STUDIO_GOALS
from hybrid_rlhf.studio.new_jobs import new_folder
from hybrid_rlhf.studio.studio import Refused, Route, Studio

LIGHT = ("options", "settings", "card")  # kinds of questions that take a moment, beside those that may take minutes
SECONDS, MAX_BYTES = 120.0, 2 << 30  # limits of one question
IDLE, IDLE_ON_CARD = 600.0, 15.0  # seconds; on a GPU the process holds memory that a run may need
_START = ("import sys; sys.path[:] = sys.argv[1:]; "  # without the working directory
          "from hybrid_rlhf.studio.preflight import main; main()")
_CARD_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD and WSL
_log = logging.getLogger(__name__)
_importing, _writing = threading.Lock(), threading.Lock()


def routes(studio: Studio, look: Look) -> list[Route]:
    known_options = cache(lambda stage: look.ask("options", {"stage": stage}, f"options {stage}"))
    known_card = cache(find_card)

    def goals(_query: dict, _body: dict) -> dict:
        try:
            card = known_card()
        except Refused:  # not cached: asked again next time
            card = "cpu"
        return {"goals": [{"id": name, **goal._asdict()} for name, goal in STUDIO_GOALS.items()], "cards": list(CARDS),
                "card": card, "builtin_rewards": [{"name": name, "help": text}
                                                  for name, text in BUILTIN_REWARDS.items()]}

    def settings(_query: dict, body: dict) -> dict:
        folder, error, file = None, None, "settings.yaml"
        if body.get("run"):
            try:
                path = new_folder(studio, body["run"])
                folder, file = _shown(path), f"{path.name}.yaml"
            except Refused as refusal:
                error = str(refusal)
        asked = {key: body.get(key) for key in ("stage", "settings", "card")}
        answer = look.ask("settings", asked | {"output_dir": folder, "run_error": error})
        return answer | {"file": file, "command": f"hybrid-rlhf --stage {body.get('stage')} --config {file}"}

    def ask(kind: str, *keys: str) -> Route:
        return Route("POST", f"/api/{kind}", lambda _query, body: look.ask(kind, {key: body.get(key) for key in keys}))

    return [Route("GET", "/api/goals", goals),
            Route("GET", "/api/options", lambda query, _body: known_options(str(query.get("stage")))),
            Route("POST", "/api/settings", settings),
            ask("data", "path", "stage", "columns", "name", "split"),
            ask("preview", "stage", "settings", "card"),
            ask("plan", "stage", "settings", "card", "memory")]


def may_have_card() -> bool:
    """Whether device files suggest a GPU of NVIDIA or AMD."""
    return sys.platform != "darwin" and any(map(os.path.exists, _CARD_FILES))


def find_card() -> str:
    """The preset for this machine's first GPU, or cpu. A temporary process detects it, so that no GPU memory is held
    afterwards."""
    if not may_have_card():
        return "cpu"
    look = Look()
    try:
        return str(look.ask("card", {})["card"])
    finally:
        look.close()


def _shown(folder: Path) -> str:
    """The path relative to the working directory, if it is below it: such a file is portable."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


# -- the process -----------------------------------------------------------------------------------------------------


@dataclass
class _Question:
    kind: str
    key: str
    content: dict
    number: int
    is_replaced: bool = False
    reply: dict | None = None

    @property
    def is_light(self) -> bool:
        return self.kind in LIGHT


@dataclass
class _Child:
    """The child process. why: the reason of a kill; culprit: the question that caused it."""

    process: subprocess.Popen
    has_ended: bool = False
    holds_card: bool = False
    culprit: _Question | None = None
    why: str = ""
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, question: _Question) -> None:
        text = json.dumps({"number": question.number, "kind": question.kind, "asked": question.content})
        with self.sending, suppress(BrokenPipeError):  # the reader notices the end of the process
            self.process.stdin.write(f"{text}\n".encode())
            self.process.stdin.flush()

    def kill(self, why: str, culprit: _Question | None = None) -> None:
        self.why, self.culprit = why, culprit
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def num_bytes(self) -> int:
        """Resident memory without shared pages."""
        try:
            memory = psutil.Process(self.process.pid).memory_info()
        except psutil.Error:
            return 0
        return memory.rss - getattr(memory, "shared", 0)


class Look:
    """Asks the child process. Any thread may ask; two questions run at a time, one of LIGHT and one other."""

    def __init__(self, seconds: float = SECONDS, most_bytes: int = MAX_BYTES, idle: float = IDLE, start: str = _START
                 ) -> None:
        """start: the program of the process; its arguments are sys.path."""
        self._seconds, self._most_bytes, self._idle, self._code = seconds, most_bytes, idle, start
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: dict[str, _Question] = {}
        self._busy: dict[bool, _Question] = {}  # is_light -> running question
        self._child: _Child | None = None
        self._timer: threading.Timer | None = None
        self._is_closed = False

    def ask(self, kind: str, content: dict, key: str | None = None) -> dict:
        """The answer to a question. key: it replaces a waiting question with this key (default: its kind). Raises
        Refused: 409 if a newer question has replaced it, 400 for a mistake in it, 503 or 504 if the process ended or
        took too long."""
        question = _Question(kind, key or kind, content, next(self._numbers))
        self._take_turn(question)
        try:
            for _ in range(2):  # retry once, if the process was killed for another question
                child = self._send(question)
                self._wait(question, child)
                if question.reply is not None or child.culprit is question or not (child.why or question.is_light):
                    break
        finally:
            with self._changed:
                self._busy.pop(question.is_light, None)
                self._changed.notify_all()
                self._end_when_idle()
        return _answer(question, child)

    def close(self) -> None:
        """End the process; later questions are refused."""
        with self._changed:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._child is not None:
                self._child.kill("the studio ends")
            self._changed.notify_all()

    def _take_turn(self, question: _Question) -> None:
        with self._changed:
            if question.key in self._waiting:
                self._waiting[question.key].is_replaced = True
            self._waiting[question.key] = question
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: question.is_replaced or self._is_closed or question.is_light not in self._busy)
            if question.is_replaced:
                raise Refused(409, "replaced")
            del self._waiting[question.key]
            if self._is_closed:
                raise Refused(503, "the studio ends")
            self._busy[question.is_light] = question

    def _send(self, question: _Question) -> _Child:
        with self._changed:
            if self._is_closed:
                raise Refused(503, "the studio ends")
            if self._child is None or self._child.has_ended or self._child.why:
                self._child = _Child(subprocess.Popen(
                    [sys.executable, "-c", self._code, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, start_new_session=True))
                threading.Thread(target=self._read, args=(self._child,), daemon=True).start()
            child = self._child
        child.send(question)
        return child

    def _wait(self, question: _Question, child: _Child) -> None:
        """Wait for a reply or the end of the process, which is killed if it exceeds time or memory."""
        deadline = time.monotonic() + self._seconds
        with self._changed:
            while question.reply is None and not child.has_ended:
                self._changed.wait(0.25)
                if question.reply is not None or child.why:
                    continue
                if time.monotonic() > deadline:
                    child.kill(f"no answer within {self._seconds:g} seconds", question)
                elif child.num_bytes > self._most_bytes:
                    child.kill(f"it takes more than {self._most_bytes / 2**30:g} GiB of memory",
                               self._busy.get(False, question))

    def _read(self, child: _Child) -> None:
        """Assign replies to their questions until the process ends."""
        for line in child.process.stdout:
            if not line.endswith(b"\n"):  # partial, of a killed process
                break
            reply = json.loads(line)
            with self._changed:
                child.holds_card = bool(reply.get("holds_card"))
                for question in self._busy.values():
                    if question.number == reply["number"]:
                        question.reply = reply
                self._changed.notify_all()
        child.process.wait()
        with self._changed:
            child.has_ended = True
            self._changed.notify_all()

    def _end_when_idle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_closed or self._child is None:
            return
        self._timer = threading.Timer(IDLE_ON_CARD if self._child.holds_card else self._idle, self._end_if_idle)
        self._timer.daemon = True
        self._timer.start()

    def _end_if_idle(self) -> None:
        with self._changed:
            if self._child is not None and not self._busy and not self._waiting:
                self._child.kill("not needed")


def _answer(question: _Question, child: _Child) -> dict:
    if question.reply is None:
        status = 504 if "seconds" in child.why else 503
        why = child.why or f"the process that looks ended (code {child.process.returncode})"
        raise Refused(status, f"{why}; the command line has no such bounds: hybrid-rlhf --stage ... --config FILE"
                      + (f" --{question.kind}" if question.kind in ("preview", "plan") else ""))
    error = question.reply.get("error")
    if error is None:
        return question.reply["answer"]
    if "traceback" in error:
        shown = error["traceback"].encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be logged
        _log.error("a question of the studio's page failed\n%s", shown)
    raise Refused(error["status"], error["text"], error["option"])


# -- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer until standard input ends, in two threads: one for LIGHT questions."""
    requests, replies = _own_streams()
    lanes: dict[bool, queue.SimpleQueue] = {is_light: queue.SimpleQueue() for is_light in (True, False)}
    for lane in lanes.values():
        threading.Thread(target=_serve, args=(lane, replies), daemon=True).start()
    for line in requests:
        request = json.loads(line)
        lanes[request["kind"] in LIGHT].put(request)
    os._exit(0)  # does not wait for an unneeded answer


def _own_streams() -> tuple[TextIO, TextIO]:
    """Duplicates of the standard streams; libraries that print or prompt get /dev/null instead."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    return requests, replies


def _serve(lane: queue.SimpleQueue, replies: TextIO) -> None:
    while True:
        request = lane.get()
        text = to_json({"number": request["number"], **reply(request["kind"], request["asked"])})
        with _writing:
            replies.write(f"{text}\n")
            replies.flush()


def reply(kind: str, asked: dict) -> dict:
    """{"answer"} or {"error"}, and whether the process holds GPU memory."""
    try:
        with _importing:  # concurrent imports of one library may see it half initialised
            from hybrid_rlhf.studio.preflight_answers import answer
        result = {"answer": answer(kind, asked)}
    except UserError as error:
        result = {"error": {"status": 400, "text": str(error), "option": getattr(error, "option", None)}}
    except Exception as error:
        text = f"an error of the studio ({type(error).__name__}); its terminal says more"
        result = {"error": {"status": 500, "text": text, "option": None,
                            "traceback": "".join(traceback.format_exception(error))}}
    torch = sys.modules.get("torch")
    return {**result, "holds_card": bool(torch is not None and torch.cuda.is_initialized())}
