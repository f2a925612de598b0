"""Processes behind the studio's chat: exports of checkpoints, one after another, then `hybrid-rlhf serve`.

The studio itself computes nothing: it reads the output of these processes and sends requests to their local port, with
a key in their environment. `main` is their entry point: a command of ours that ends when the studio that started it
ends, even by a kill.
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
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybrid_rlhf.core.errors import shortened
from hybrid_rlhf.core.own_files import fresh_folder, is_locked, is_unfinished, take_lock
from hybrid_rlhf.inference.server.serve import KEY_VARIABLE
from hybrid_rlhf.studio.run_files import newest_checkpoint, step_of

COMMAND = (sys.executable, "-P", "-m", "hybrid_rlhf.studio.chat_process")
LIMITS = ("--max_batch", "8", "--max_queue", "16")  # for one user
STOP_SECONDS, TRIES = 5.0, 3
_SERVING = re.compile(r"serving .* at http://127\.0\.0\.1:(\d+)")
_SHOWN = ("note:", "warning:")  # prefixes of lines that the page shows


class Talkable(NamedTuple):
    """A run with a model to chat with. status: as in the list of runs. path: its model's folder, or with `step` the
    checkpoint of that step; None if there is neither, with the reason in `why`."""

    id: str
    stage: str
    status: str
    kind: str
    path: Path | None = None
    step: int | None = None
    why: str | None = None

    def shape(self) -> dict:
        """As JSON for the page."""
        return {"id": self.id, "stage": self.stage, "status": self.status, "step": self.step, "kind": self.kind,
                "why": self.why}


@dataclass(frozen=True)
class ChatModels:
    """The models to chat with. is_on_cpu: whether they run on the CPU, to leave a GPU to training. learn: the run's
    folder in which the one model learns from marks."""

    models: tuple[Talkable, ...]
    reward: Talkable | None = None
    is_on_cpu: bool = False
    learn: Path | None = None

    def names(self) -> dict[str, Talkable]:
        """The models by their names in the server: a run's id without characters that names cannot have."""
        names: dict[str, Talkable] = {}
        for model in self.models:
            name = re.sub(r"[^A-Za-z0-9_.:-]", "-", model.id).lstrip("-") or "model"
            while name in names:
                name += "-2"
            names[name] = model
        return names


class _Ended(Exception):  # noqa: N818
    """Why a process ended, in one line."""


class ChatProcess:
    """Open the chosen models, in a separate thread, after the previous process (`before`) has ended.

    state: starting, ready, failed or closed; doing: current work while starting; notes: lines of the server for
    the page; error: why it failed. folder: .studio/talk, for exports of checkpoints. changed: called after each change.
    """

    def __init__(self, choice: ChatModels, folder: Path, changed: Callable[[], None],
                 before: ChatProcess | None = None) -> None:
        self.choice, self.key = choice, secrets.token_urlsafe(32)
        self.state, self.doing, self.error, self.port = "starting", "starting", "", 0
        self.notes: list[str] = []
        self._folder, self._changed, self._before = folder, changed, before
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._thread = threading.Thread(target=self._work, name="chat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin_close(self) -> None:
        """Stop it, without waiting."""
        with self._lock:
            was_open, self.state = self.state in ("starting", "ready"), "closed"
            if was_open and self._process is not None:
                self._process.terminate()

    def close(self) -> None:
        """Stop it, and wait for its processes."""
        self.begin_close()
        if not self._thread.is_alive():
            return
        self._thread.join(STOP_SECONDS)
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)  # the whole session
        self._thread.join(STOP_SECONDS)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            if self._before is not None:
                self._set_doing("closing the models before")
                self._before.close()
                self._before = None
            self._serve()
        except (_Ended, OSError) as error:
            with self._lock:
                if self.state != "closed":
                    self.state, self.error = "failed", str(error)
        self._changed()

    def _serve(self) -> None:
        with _own_folder(self._folder) as place:
            names = self.choice.names()
            words = ["serve", "--port", "0", *LIMITS]
            for name, model in names.items():
                words += ["--model", f"{name}={self._model(model, place / name)}"]
            if self.choice.reward is not None:
                words += ["--reward_model", str(self._model(self.choice.reward, place / "reward"))]
            if self.choice.learn is not None:
                words += ["--learn", str(self.choice.learn)]
            self._set_doing("loading " + " and ".join([*names, *(["the reward model"] if self.choice.reward else [])]))
            for line in self._lines(words):
                if line.startswith(_SHOWN):
                    self.notes.append(line)
                if match := _SERVING.fullmatch(line):
                    self._become_ready(int(match[1]), place)
        raise _Ended("the server of the models has ended")

    def _become_ready(self, port: int, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)  # the models are loaded
        with self._lock:
            if self.state == "starting":
                self.port, self.state, self.doing = port, "ready", ""
        self._changed()

    def _model(self, model: Talkable, place: Path) -> Path:
        """The model's folder: that of the run, or `place` with an export of its newest checkpoint."""
        path = model.path
        assert path is not None
        if model.step is None:
            return path
        for left in reversed(range(TRIES)):
            self._set_doing(f"making the model of {model.id} at step {step_of(path)} from its checkpoint")
            try:
                for _ in self._lines(["export", "--model", str(path), "--output_dir", str(place)]):
                    pass
                break
            except _Ended as error:
                newer = newest_checkpoint(path.parent.parent)
                if path.exists() or newer is None or not left:
                    raise _Ended(f"{model.id}: {error}") from None
                path = newer  # the run has continued, and removed the older one
        return place

    def _lines(self, words: Sequence[str]) -> Iterator[str]:
        """Run a process and yield its output lines. Raises _Ended if it fails or is closed."""
        env = {**os.environ, KEY_VARIABLE: self.key, "PYTHONUNBUFFERED": "1"}
        if self.choice.is_on_cpu:
            env |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        with self._lock:
            if self.state == "closed":
                raise _Ended("closed")
            process = self._process = subprocess.Popen(
                [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
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

    def _set_doing(self, doing: str) -> None:
        self.doing = doing
        self._changed()


def _reason(lines: list[str], code: int) -> str:
    """Why a process has ended: its last error, or the last line that it printed."""
    error = next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), "")
    if code == -signal.SIGKILL:
        return "the process was killed, as the system does when memory runs out; take fewer or smaller models"
    return error or (lines[-1] if lines else f"the process ended with exit code {code}")


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """A new folder in `folder` during the block. Leftovers of killed studios are removed."""
    for path in folder.iterdir():
        if is_unfinished(path.name) and (path / "lock").exists() and not is_locked(path / "lock"):
            shutil.rmtree(path, ignore_errors=True)
    with fresh_folder(folder) as place, take_lock(place / "lock"):
        yield place


# -- in the processes --------------------------------------------------------------------------------------------------


def main() -> int:
    """Run the launcher, in a process that ends with the studio."""
    from hybrid_rlhf.__main__ import launch

    threading.Thread(target=_end_with_the_studio, daemon=True).start()
    return launch()


def _end_with_the_studio() -> None:
    """Wait for the end of standard input, which the system closes in any case when the studio ends; then end this
    process and all others of its session. (Linux's PR_SET_PDEATHSIG depends on the thread that started the process, and
    other systems have nothing like it.)"""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
