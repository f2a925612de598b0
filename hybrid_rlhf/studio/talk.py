"""The studio's chat: runs with models to chat with, the open models, and a proxy to their server."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from hybrid_rlhf.inference.named_models import learns_on
from hybrid_rlhf.inference.server import page_policy
from hybrid_rlhf.studio.chat_process import ChatModels, ChatProcess, Talkable
from hybrid_rlhf.studio.example import hints
from hybrid_rlhf.studio.new_jobs import run_folder
from hybrid_rlhf.studio.preflight import may_have_card
from hybrid_rlhf.studio.run_files import MODEL, RECORD, newest_checkpoint, step_of
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import Refused, Route, Studio, bounded_body, own_folder, read_json
from hybrid_rlhf.training.registry import STAGES

IDLE_SECONDS = 15 * 60.0
SILENCE_SECONDS = 330.0  # the server's request timeout is 300
POLICY, REWARD = "policy", "reward model"
TAUGHT = "chat"  # the stage of a run that learns from marks
SHARED = Path(page_policy.__file__).parent / "page" / "chat_stream.js"  # code of both chat pages
_RETURNED = ("content-type", "content-length", "retry-after")  # headers of an answer that are passed on


def routes(talk: Talk) -> list[Route]:
    def forward(path: str, needs_reward: bool = False) -> Callable:
        async def answer(request: Request) -> Response:
            port, key = talk.address(needs_reward)
            return PassThrough(request, f"http://127.0.0.1:{port}{path}", key, await bounded_body(request), talk.using)

        return answer

    async def shared(_request: Request) -> Response:
        headers = {name.decode(): value.decode() for name, value in page_policy.PAGE_HEADERS}
        return FileResponse(SHARED, media_type="text/javascript", headers=headers)

    return [
        Route("GET", "/api/talk/models", lambda _query, _body: {"models": [row.shape() for row in talk.talkables()]}),
        Route("GET", "/api/talk", lambda _query, _body: talk.state()),
        Route("POST", "/api/talk/open", lambda _query, body: talk.open(body)),
        Route("POST", "/api/talk/close", lambda _query, _body: talk.close()),
        Route("POST", "/api/talk/v1/chat/completions", forward("/v1/chat/completions"), is_raw=True),
        Route("GET", "/api/talk/v1/models", forward("/v1/models"), is_raw=True),
        Route("POST", "/api/talk/score", forward("/score", needs_reward=True), is_raw=True),
        Route("GET", "/api/talk/v1/marks", forward("/v1/marks"), is_raw=True),
        *(Route("POST", f"/api/talk/v1/marks{what}", forward(f"/v1/marks{what}"), is_raw=True)
          for what in ("", "/undo", "/save")),
        Route("GET", "/chat_stream.js", shared, is_raw=True)]


class Talk:
    """The open models, at most one set. idle_seconds: time without requests after which they are closed."""

    def __init__(self, studio: Studio, runs: RunList, idle_seconds: float = IDLE_SECONDS) -> None:
        self._studio, self._runs, self._idle_seconds = studio, runs, idle_seconds
        self._lock = threading.Lock()
        self._process: ChatProcess | None = None
        self._num_open, self._used, self._note = 0, time.monotonic(), ""
        self._has_ended = threading.Event()
        self._watch: threading.Thread | None = None

    # -- runs ---------------------------------------------------------------------------------------------------------

    def talkables(self) -> list[Talkable]:
        """All runs of stages that save a model, newest first."""
        rows = (self._talkable(row) for row in self._runs.rows()[0])
        return [row for row in rows if row is not None]

    def _talkable(self, row: dict) -> Talkable | None:
        """A run with its model, or else with its newest checkpoint; None if its stage saves no model."""
        stage, status, folder = row["stage"], row["status"], self._studio.outputs / row["id"]
        kind = STAGES[stage].leaves if stage in STAGES else POLICY  # a custom stage saves one
        if not stage or kind is None:
            return None
        if status == "finished" and (folder / MODEL / "config.json").is_file():
            return Talkable(row["id"], stage, status, kind, folder / MODEL)
        checkpoint = newest_checkpoint(folder)
        if checkpoint is None:
            why = "it has no checkpoint yet" if status == "running" else "it left no model and no checkpoint"
            return Talkable(row["id"], stage, status, kind, why=why)
        return Talkable(row["id"], stage, status, kind, checkpoint, step_of(checkpoint))

    def _find(self, name: str, kind: str) -> Talkable:
        """The run of an id. Raises Refused if there is none, for another kind, and without a model."""
        run = self._talkable(self._runs.row(name))
        if run is None:
            raise Refused(404, f"there is no model of {name!r}")
        if run.kind != kind:
            does = "answers, and gives no scores" if run.kind == POLICY else "gives scores, and cannot answer"
            raise Refused(400, f"{run.id} is a {run.kind}: it {does}")
        if run.path is None:
            raise Refused(409, f"{run.id}: {run.why}")
        return run

    # -- open models --------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """State for the page. learn: the run that the marks train; doing: current work while starting; notes: lines of
        the server; has_card: whether this machine may have a GPU."""
        process = self._process
        if process is not None and process.state == "closed":  # it may still be ending
            process = None
        names = process.choice.names() if process else {}
        learn = process.choice.learn if process and process.state != "failed" else None
        return {"state": process.state if process else "closed", "error": process.error if process else "",
                "models": [{"name": name, "id": model.id, "step": model.step} for name, model in names.items()],
                "hints": next(filter(None, (hints(read_json(self._studio.outputs / model.id / RECORD) or {})
                                            for model in names.values())), None),
                "learn": str(learn.relative_to(self._studio.outputs)) if learn else None,
                "reward": bool(process and process.choice.reward), "doing": process.doing if process else "",
                "notes": [*([self._note] if self._note else []), *(process.notes if process else [])],
                "is_on_cpu": bool(process and process.choice.is_on_cpu),
                "has_card": may_have_card()}

    def open(self, body: dict) -> dict:
        """Open {"models": [ids], "reward": id or null, "is_on_cpu", "learn": id or null}; returns the state. The same
        choice stays open; another one is closed first. Raises Refused for runs without a model to chat with."""
        choice = self._choice(body)
        folder = own_folder(self._studio, "talk")
        with self._lock:
            before, self._note = self._process, ""
            self._used = time.monotonic()
            if before and before.choice == choice and before.state in ("starting", "ready"):
                return self.state()
            if before:
                before.begin_close()
            self._process = ChatProcess(choice, folder, self._changed, before)
            self._process.start()
            if self._watch is None:
                self._watch = threading.Thread(target=self._close_when_idle, name="chat-idle", daemon=True)
                self._watch.start()
        self._changed()
        return self.state()

    def _choice(self, body: dict) -> ChatModels:
        models, reward, learn = body["models"], body.get("reward"), body.get("learn")
        folder = None if learn is None else run_folder(self._studio, learn)
        taught = self._taught(folder) if folder and (folder / RECORD).exists() else None
        chosen = [taught if taught and name == learn else self._find(name, POLICY) for name in models]
        chosen += map(other_model, body.get("paths") or [])
        if not chosen:
            raise Refused(400, "choose a model to talk to")
        if folder and len(chosen) > 1:
            raise Refused(400, "one model learns: choose no other to compare with")
        if folder and chosen[0].step is not None:
            raise Refused(409, f"{chosen[0].id} has no finished model to learn on; talk to it without learning")
        return ChatModels(tuple(chosen), None if reward is None else self._find(reward, REWARD),
                          body.get("is_on_cpu", False), folder)

    def _taught(self, folder: Path) -> Talkable:
        """The model that a run of an earlier chat began with, as the chat goes on from its marks."""
        record, name = read_json(folder / RECORD) or {}, str(folder.relative_to(self._studio.outputs))
        if record.get("stage") != TAUGHT:
            raise Refused(409, f"{name} has not learnt from marks; give the run that will another name")
        return Talkable(name, TAUGHT, record["status"], POLICY, Path(learns_on(str(folder), str(folder))))

    def close(self, note: str = "") -> dict:
        """Close the models, wait for their processes, and return the state."""
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
        """Close everything when the studio ends."""
        self._has_ended.set()
        self.close()

    def address(self, needs_reward: bool = False) -> tuple[int, str]:
        """Port and key of the server. Raises Refused if it is not ready, or has no reward model."""
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
        """Within the block (a request) the models are not closed as idle."""
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
        self._used = time.monotonic()  # restarts the idle time, since opening may take long
        self._studio.news.publish("talk", {})


def other_model(text: str) -> Talkable:
    """A model that no run of this studio made: a folder, or a hub id. Raises Refused for a folder that is none."""
    path, name = Path(text).expanduser(), text.strip()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or path.is_dir():
        whole = [folder for folder in (path, path / MODEL) if (folder / "config.json").is_file()]
        if not whole:
            raise Refused(400, f"{name[:200]!r} is neither a model folder (one with config.json) nor a hub id")
        return Talkable(name, "", "finished", POLICY, whole[0].resolve())
    return Talkable(name, "", "finished", POLICY, Path(name))


class PassThrough(Response):
    """Proxy a request to the server at `url`, streaming its answer. Of the page's headers only the content type is
    forwarded. If the client disconnects, the request is cancelled, even before its first token. using: a context
    manager around the request."""

    def __init__(self, request: Request, url: str, key: str, body: bytes, using: Callable[[], AbstractContextManager]
                 ) -> None:
        kind = request.headers.get("content-type")
        headers = {"authorization": f"Bearer {key}"} | ({"content-type": kind} if kind else {})
        self._request, self._using = httpx.Request(request.method, url, headers=headers, content=body), using
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def until_reader_leaves() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        with self._using():
            tasks = [asyncio.ensure_future(self._answer(scope, receive, send)),
                     asyncio.ensure_future(until_reader_leaves())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if tasks[0].done():
                    tasks[0].result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_stream = False
        # local: without proxies of the environment, and without certificates, which are slow to load
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=5.0)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False) as client:
            try:
                answer = await client.send(self._request, stream=True)
                is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
                whole = None if is_stream else await answer.aread()
                headers = [(name.encode(), answer.headers[name].encode()) for name in _RETURNED
                           if name in answer.headers]
                await send({"type": "http.response.start", "status": answer.status_code,
                            "headers": [*headers, (b"cache-control", b"no-store")]})
                if whole is None:
                    async for part in answer.aiter_bytes():
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": whole or b""})
            except httpx.HTTPError:
                error = {"error": {"message": "the models' process has ended or does not answer"}}
                if is_stream:
                    await send({"type": "http.response.body", "body": f"data: {json.dumps(error)}\n\n".encode()})
                else:
                    await JSONResponse(error, 502)(scope, receive, send)
