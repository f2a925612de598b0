"""The studio's chat: which models are open, the way to them, and that they close when nobody talks to them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from hybrid_rlhf.inference.server import page_policy
from hybrid_rlhf.studio import chat_process
from hybrid_rlhf.studio.chat_process import ChatProcess, Choice
from hybrid_rlhf.studio.pass_through import PassThrough, body_of
from hybrid_rlhf.studio.studio import Refused, Route, Studio
from hybrid_rlhf.studio.studio_files import own_folder
from hybrid_rlhf.studio.talk_models import POLICY, REWARD, talkable, talkables

MAX_MODELS = 3
IDLE_SECONDS = 15 * 60.0
SHARED = Path(page_policy.__file__).parent / "page" / "chat_stream.js"  # what both chat pages do
_CARDS = ("/proc/driver/nvidia/version", "/dev/kfd")


def routes(studio: Studio, talk: Talk) -> list[Route]:
    def forward(path: str, needs_reward: bool = False) -> Callable:
        async def answer(request: Request) -> Response:
            port, key = talk.address(needs_reward)
            body = await body_of(request)
            return PassThrough(request.method, f"http://127.0.0.1:{port}{path}", key, body,
                               request.headers.get("content-type"), talk.using)

        return answer

    async def shared(_request: Request) -> Response:
        headers = {name.decode(): value.decode() for name, value in page_policy.PAGE_HEADERS}
        return FileResponse(SHARED, media_type="text/javascript", headers=headers)

    return [
        Route("GET", "/api/talk/models", lambda _query, _body: {"models": [e.row() for e in talkables(studio)]}),
        Route("GET", "/api/talk", lambda _query, _body: talk.state()),
        Route("POST", "/api/talk/open", lambda _query, body: talk.open(body)),
        Route("POST", "/api/talk/close", lambda _query, _body: talk.close()),
        Route("POST", "/api/talk/v1/chat/completions", forward("/v1/chat/completions"), is_raw=True),
        Route("GET", "/api/talk/v1/models", forward("/v1/models"), is_raw=True),
        Route("POST", "/api/talk/score", forward("/score", needs_reward=True), is_raw=True),
        Route("GET", "/chat_stream.js", shared, is_raw=True)]


class Talk:
    """At most one set of models is open. idle_seconds: without a request, after which it closes. command: what starts
    a process of ours."""

    def __init__(self, studio: Studio, idle_seconds: float = IDLE_SECONDS, command: Sequence[str] = ()) -> None:
        self._studio, self._idle_seconds = studio, idle_seconds
        self._command = command or chat_process.COMMAND
        self._lock = threading.Lock()
        self._process: ChatProcess | None = None
        self._num_open, self._used, self._note = 0, time.monotonic(), ""
        self._has_ended = threading.Event()
        self._watch: threading.Thread | None = None

    def state(self) -> dict:
        """For the page. doing: what goes on while it starts; notes: what the server has to say; has_card: whether
        there may be one to leave alone."""
        process = self._process
        if process is not None and process.state == "closed":  # it may take a while to end
            process = None
        names = process.choice.names() if process else {}
        return {"state": process.state if process else "closed", "error": process.error if process else "",
                "models": [{"name": name, "id": each.id, "step": each.step} for name, each in names.items()],
                "reward": bool(process and process.choice.reward), "doing": process.doing if process else "",
                "notes": [*([self._note] if self._note else []), *(process.notes if process else [])],
                "is_on_cpu": bool(process and process.choice.is_on_cpu),
                "has_card": any(os.path.exists(path) for path in _CARDS)}

    def open(self, body: dict) -> dict:
        """{"models": [ids], "reward": id or null, "is_on_cpu"}: the state. What is open already stays; anything else
        is closed first. Refused for what cannot be talked to."""
        choice = self._choice(body)
        folder = own_folder(self._studio, "talk")
        with self._lock:
            before, self._note = self._process, ""
            self._used = time.monotonic()
            if before and before.choice == choice and before.state in ("starting", "ready"):
                return self.state()
            if before:
                before.begin_close()
            self._process = ChatProcess(choice, folder, self._changed, before, self._command)
            self._process.start()
            if self._watch is None:
                self._watch = threading.Thread(target=self._close_when_idle, name="chat-idle", daemon=True)
                self._watch.start()
        self._changed()
        return self.state()

    def _choice(self, body: dict) -> Choice:
        models, reward, is_on_cpu = body.get("models"), body.get("reward"), body.get("is_on_cpu", False)
        if not isinstance(models, list) or not isinstance(is_on_cpu, bool):
            raise Refused(400, "models must be a list of runs, and is_on_cpu true or false")
        if not models:
            raise Refused(400, "choose a model to talk to")
        if len(models) > MAX_MODELS:
            raise Refused(400, f"{len(models)} models are more than the {MAX_MODELS} that fit side by side")
        if len({str(name) for name in models}) < len(models):
            raise Refused(400, "a model is named twice")
        return Choice(tuple(talkable(self._studio, name, POLICY) for name in models),
                      None if reward is None else talkable(self._studio, reward, REWARD), is_on_cpu)

    def close(self, note: str = "") -> dict:
        """The state, when the processes have ended."""
        with self._lock:
            process, self._note = self._process, note
            if process:
                process.begin_close()
        if process:
            process.close()
            with self._lock:
                if self._process is process:
                    self._process = None
        self._changed()
        return self.state()

    def end(self) -> None:
        """At the studio's end."""
        self._has_ended.set()
        self.close()

    def address(self, needs_reward: bool = False) -> tuple[int, str]:
        """Port and key of the server. Refused where there is none yet, or no more, or no reward model in it."""
        process = self._process
        if process is None or process.state in ("closed", "failed"):
            raise Refused(409, "no model is open; choose one and open it")
        if process.state == "starting":
            raise Refused(409, f"the models are not there yet ({process.doing}); wait a little")
        if needs_reward and process.choice.reward is None:
            raise Refused(409, "no reward model is open; choose one and open it")
        return process.port, process.key

    @contextmanager
    def using(self) -> Iterator[None]:
        """Around a request: while one is under way the models stay."""
        with self._lock:
            self._num_open += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open, self._used = self._num_open - 1, time.monotonic()

    def _close_when_idle(self) -> None:
        while not self._has_ended.wait(min(10.0, self._idle_seconds / 4)):
            with self._lock:
                is_idle = self._num_open == 0 and time.monotonic() - self._used > self._idle_seconds
                is_open = self._process is not None and self._process.state == "ready"
            if is_idle and is_open:
                self.close(f"closed after {self._idle_seconds / 60:g} minutes without a question")

    def _changed(self) -> None:
        self._used = time.monotonic()  # what has taken long to open is not idle
        self._studio.news.publish("talk", {})
