"""The processes behind the studio's chat: models out of checkpoints, one after another, then `hybrid-rlhf serve`.

None of it is computed in the studio: what is read here is what they print, and what is asked goes to a port of theirs
on this machine, under a key that their environment alone has.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.core.own_files import fresh_path, is_unfinished
from hybrid_rlhf.core.text_safety import shortened
from hybrid_rlhf.inference.server.serve import KEY_VARIABLE
from hybrid_rlhf.studio import file_lock
from hybrid_rlhf.studio.named_code import module_code
from hybrid_rlhf.studio.talk_models import Talkable, newest_step

COMMAND = (sys.executable, "-c", module_code("hybrid_rlhf.studio.tied_process", "main"))
LIMITS = ("--max_batch", "8", "--max_queue", "16")  # one person's questions
STOP_SECONDS, TRIES = 5.0, 3
_SERVING = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)")
_HARMLESS = ("note:", "warning:")  # how lines begin that are worth showing


@dataclass(frozen=True)
class Choice:
    """What is talked to. is_on_cpu: whether a card is left to the training."""

    models: tuple[Talkable, ...]
    reward: Talkable | None = None
    is_on_cpu: bool = False

    def names(self) -> dict[str, Talkable]:
        """The models by the names that the server gives them: a run's id, without what no name may have."""
        found: dict[str, Talkable] = {}
        for each in self.models:
            name = re.sub(r"[^A-Za-z0-9_.:-]", "-", each.id).lstrip("-") or "model"
            while name in found:
                name += "-2"
            found[name] = each
        return found


class _Ended(Exception):  # noqa: N818 - a process failed, or was ended from here
    """Why, in one line."""


class ChatProcess:
    """One opening, in a thread of its own, after the one `before` it has ended.

    state: starting, ready, failed or closed; doing: what it is at while it starts; notes: what the server said beside;
    error: why it failed. folder: .studio/talk, for models out of checkpoints. changed: called after each change.
    """

    def __init__(self, choice: Choice, folder: Path, changed: Callable[[], None], before: ChatProcess | None = None,
                 command: Sequence[str] = COMMAND) -> None:
        self.choice, self.key = choice, secrets.token_urlsafe(32)
        self.state, self.doing, self.error, self.port = "starting", "starting", "", 0
        self.notes: list[str] = []
        self._folder, self._changed, self._before, self._command = folder, changed, before, tuple(command)
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._thread = threading.Thread(target=self._work, name="chat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_close(self) -> None:
        """End it; returns at once."""
        with self._lock:
            was_open, self.state = self.state in ("starting", "ready"), "closed"
            if was_open and self._process is not None:
                _signal(self._process, signal.SIGTERM)

    def close(self) -> None:
        """End it; returns when its processes have ended."""
        self.begin_close()
        if not self._thread.is_alive():
            return
        self._thread.join(STOP_SECONDS)
        with self._lock:
            if self._process is not None:
                _signal(self._process, signal.SIGKILL)
        self._thread.join(STOP_SECONDS)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            if self._before is not None:
                self._tell("closing the models before")
                self._before.close()
                self._before = None
            self._serve()
        except (_Ended, OSError) as error:
            with self._lock:
                if self.state != "closed":
                    self.state, self.error = "failed", str(error)
        self._changed()

    def _serve(self) -> None:
        with _own_place(self._folder) as place:
            names = self.choice.names()
            words = ["serve", "--port", "0", *LIMITS]
            for name, each in names.items():
                words += ["--model", f"{name}={self._model(each, place / name)}"]
            if self.choice.reward is not None:
                words += ["--reward_model", str(self._model(self.choice.reward, place / "reward"))]
            self._tell("loading " + " and ".join([*names, *["the reward model"] * (self.choice.reward is not None)]))
            for line in self._lines(words):
                if line.startswith(_HARMLESS):
                    self.notes.append(line)
                if found := _SERVING.fullmatch(line):
                    self._become_ready(int(found[1]), place)
        raise _Ended("the server of the models has ended")

    def _become_ready(self, port: int, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)  # the models are in memory
        with self._lock:
            if self.state == "starting":
                self.port, self.state, self.doing = port, "ready", ""
        self._changed()

    def _model(self, each: Talkable, place: Path) -> Path:
        """Where the model of a run is, made from its newest checkpoint where it has left none."""
        path = each.path
        if path is None:
            raise _Ended(f"{each.id}: {each.why}")
        if each.step is None:
            return path
        for left in reversed(range(TRIES)):
            self._tell(f"making the model of {each.id} at step {int(path.name.removeprefix('step-'))} from its "
                       "checkpoint")
            try:
                for _ in self._lines(["export", "--model", str(path), "--output_dir", str(place)]):
                    pass
                break
            except _Ended as error:
                newer = newest_step(path.parent)
                if path.exists() or newer is None or not left:
                    raise _Ended(f"{each.id}: {error}") from None
                path = path.parent / f"step-{newer:08d}"  # the run has gone on, and removed it
        return place

    def _lines(self, words: Sequence[str]) -> Iterator[str]:
        """What a process prints, line by line; _Ended where it ends badly, or is ended from here."""
        env = {**os.environ, KEY_VARIABLE: self.key, "PYTHONUNBUFFERED": "1"}
        if self.choice.is_on_cpu:
            env |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        with self._lock:
            if self.state == "closed":
                raise _Ended("closed")
            process = self._process = subprocess.Popen(
                [*self._command, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", env=env, start_new_session=True)
        last: deque[str] = deque(maxlen=50)
        try:
            with process:
                for line in process.stdout or ():
                    text = shortened(line.strip())
                    if text:
                        last.append(text)
                        yield text
        finally:
            with self._lock:
                self._process = None
        if process.returncode:
            raise _Ended(_reason(list(last), process.returncode))

    def _tell(self, doing: str) -> None:
        self.doing = doing
        self._changed()


def _reason(lines: list[str], code: int) -> str:
    """Why a process has ended: its last error, or what it said last."""
    said = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    if code == -signal.SIGKILL:
        return "the process was killed, as the system does when memory runs out; take fewer or smaller models"
    return said or (lines[-1] if lines else f"the process ended with exit code {code}")


def _signal(process: subprocess.Popen, number: int) -> None:
    """To the process; one that nothing may survive to all of its session."""
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)


@contextmanager
def _own_place(folder: Path) -> Iterator[Path]:
    """A new folder in `folder` for the time of the block. What studios that were killed have left there goes."""
    for path in folder.iterdir():
        with suppress(OSError):
            if is_unfinished(path.name) and (path / "lock").exists() and not file_lock.is_held(path / "lock"):
                shutil.rmtree(path)
    place = fresh_path(folder)
    place.mkdir(mode=0o700)
    lock = file_lock.take(place / "lock")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if lock is not None:
            os.close(lock)
