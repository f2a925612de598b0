"""Questions of the page before a run starts: goals, options, settings file, data, preview and memory plan.

The studio's own process does not import torch: `Look` asks child processes, whose entry point is `main`: a line of JSON
in, {"kind", "asked"}, and one out, {"answer"} or {"error"}. A process that takes more than two minutes or 2 GiB is
killed; one that is idle ends.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TextIO

import psutil

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.memory_plan.presets import CARDS
from hybrid_rlhf.studio.goals import BUILTIN_REWARDS, STUDIO_GOALS
from hybrid_rlhf.studio.new_jobs import new_folder
from hybrid_rlhf.studio.studio import Refused, Route, Studio, line_of

LIGHT = ("options", "settings", "card")  # kinds of questions that take a moment, beside those that may take minutes
SECONDS, MAX_BYTES = 120.0, 2 << 30  # limits of one question
IDLE, IDLE_ON_CARD = 600.0, 15.0  # seconds; on a GPU the process holds memory that a run may need
_START = ("import sys; sys.path[:] = sys.argv[2:]; "  # without the working directory
          "from hybrid_rlhf.studio.preflight import main; main()")
_CARD_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # of NVIDIA, AMD and WSL
_log = logging.getLogger(__name__)


def routes(studio: Studio, look: Look) -> list[Route]:
    known_options = cache(lambda stage: look.ask("options", {"stage": stage}))
    known_card = cache(find_card)

    def goals(_query: dict, _body: dict) -> dict:
        try:
            card = known_card()
        except Refused:  # not cached: asked again next time
            card = "cpu"
        return {"goals": [{"id": name, **goal._asdict()} for name, goal in STUDIO_GOALS.items()], "cards": list(CARDS),
                "card": card, "builtin_rewards": [{"name": name, **row._asdict()}
                                                  for name, row in BUILTIN_REWARDS.items()]}

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
            Route("POST", "/api/reward/try", lambda _query, body: look.ask("reward", body)),
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


# -- the processes ---------------------------------------------------------------------------------------------------


class Look:
    """Asks two processes, one for questions of LIGHT and one for others. Any thread may ask; each process answers one
    question at a time."""

    def __init__(self, seconds: float = SECONDS, most_bytes: int = MAX_BYTES, idle: float = IDLE, start: str = _START
                 ) -> None:
        """start: the program of a process; its arguments are `idle` and sys.path."""
        self._children = {is_light: _Child(seconds, most_bytes, [sys.executable, "-c", start, str(idle), *sys.path])
                          for is_light in (True, False)}

    def ask(self, kind: str, content: dict) -> dict:
        """The answer to a question. Raises Refused: 400 for a mistake in it, 503 or 504 if the process ended or took
        too long."""
        return self._children[kind in LIGHT].ask(kind, content)

    def close(self) -> None:
        """End the processes; later questions are refused."""
        for child in self._children.values():
            child.close()


class _Child:
    """A process that is started by the first question, and again where it has ended."""

    def __init__(self, seconds: float, most_bytes: int, words: list[str]) -> None:
        self._seconds, self._most_bytes, self._words = seconds, most_bytes, words
        self._turn = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._is_closed = False

    def ask(self, kind: str, content: dict) -> dict:
        text = json.dumps({"kind": kind, "asked": content}).encode() + b"\n"
        with self._turn:
            line, why, code = self._exchange(text)
            if code == 0:  # it ended meanwhile, as it was idle
                line, why, code = self._exchange(text)
        if code is None:
            return _answer(json.loads(line))
        why = why or f"the process that looks ended (code {code})"
        raise Refused(504 if "seconds" in why else 503,
                      f"{why}; the command line has no such bounds: hybrid-rlhf --stage ... --config FILE"
                      + (f" --{kind}" if kind in ("preview", "plan") else ""))

    def close(self) -> None:
        self._is_closed = True
        if self._process is not None:
            _kill(self._process)

    def _exchange(self, text: bytes) -> tuple[bytes, str, int | None]:
        """The reply to a question; where there is none, why the process was killed, and its exit code."""
        why = ""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, start_new_session=True)
            if self._is_closed:
                _kill(self._process)
            _, why = self._line(self._process)  # it is ready: imports do not count as time of the question
        process = self._process
        with suppress(BrokenPipeError):  # it has ended, as reading shows
            process.stdin.write(text)
            process.stdin.flush()
        line, reason = self._line(process)
        if self._is_closed:
            raise Refused(503, "the studio ends")
        return line, why or reason, None if line.endswith(b"\n") else process.wait()

    def _line(self, process: subprocess.Popen) -> tuple[bytes, str]:
        """The process's next line, and why it was killed where it was."""
        why, deadline = "", time.monotonic() + self._seconds
        while not select.select([process.stdout], [], [], 0.25)[0]:
            if time.monotonic() > deadline:
                why = f"no answer within {self._seconds:g} seconds"
            elif _num_bytes(process.pid) > self._most_bytes:
                why = f"it takes more than {self._most_bytes / 2**30:g} GiB of memory"
            if why:
                _kill(process)
        return process.stdout.readline(), why


def _kill(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _num_bytes(pid: int) -> int:
    """Resident memory without shared pages."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    return memory.rss - getattr(memory, "shared", 0)


def _answer(reply: dict) -> dict:
    error = reply.get("error")
    if error is None:
        return reply["answer"]
    if "traceback" in error:
        shown = error["traceback"].encode("utf-8", "backslashreplace").decode()  # lone surrogates cannot be logged
        _log.error("a question of the studio's page failed\n%s", shown)
    raise Refused(error["status"], error["text"], error["option"])


# -- in a process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer questions until standard input ends, or no question comes for a while."""
    requests, replies = _own_streams()
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(waiting, replies, float(sys.argv[1])), daemon=True).start()
    for line in requests:
        waiting.put(json.loads(line))
    os._exit(0)  # does not wait for an unneeded answer


def _own_streams() -> tuple[TextIO, TextIO]:
    """Duplicates of the standard streams; libraries that print or prompt get /dev/null instead."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    return requests, replies


def _serve(waiting: queue.SimpleQueue, replies: TextIO, idle: float) -> None:
    with suppress(Exception):  # `reply` tells why it fails
        importlib.import_module("hybrid_rlhf.studio.preflight_answers")
    print(file=replies, flush=True)
    while True:
        torch = sys.modules.get("torch")
        holds_card = torch is not None and torch.cuda.is_initialized()
        try:
            request = waiting.get(timeout=IDLE_ON_CARD if holds_card else idle)
        except queue.Empty:
            os._exit(0)
        replies.write(to_json(reply(request["kind"], request["asked"])) + "\n")
        replies.flush()


def reply(kind: str, asked: dict) -> dict:
    """{"answer"} or {"error"}."""
    try:
        from hybrid_rlhf.studio.preflight_answers import answer

        return {"answer": answer(kind, asked)}
    except UserError as error:
        return {"error": {"status": 400, "text": line_of(error), "option": error.option}}
    except Exception as error:
        text = f"an error of the studio ({type(error).__name__}); its terminal says more"
        return {"error": {"status": 500, "text": text, "option": None,
                          "traceback": "".join(traceback.format_exception(error))}}
