"""The application: chat completions, completions, models and health, and /score where there is a reward model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Send

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.data.chat import SkipRow, compose_prompt, encode_all
from hybrid_rlhf.engine.decode import request as engine_request
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server.completion_protocol import CompletionRequest, read_completion
from hybrid_rlhf.inference.server.completion_replies import given_prompts, stream_completion, whole_completion
from hybrid_rlhf.inference.server.guard import Guard, read_body, refuse
from hybrid_rlhf.inference.server.page_policy import with_policy
from hybrid_rlhf.inference.server.protocol import ApiError, ChatRequest, read_chat, read_json, read_score
from hybrid_rlhf.inference.server.replies import Answer, Asking, stream, whole
from hybrid_rlhf.inference.server.served_model import Limits, Served, check_length
from hybrid_rlhf.inference.server.worker import Job, Stopping, Worker

PAGE = Path(__file__).parent / "page"
BODY_SECONDS = 30.0
T = TypeVar("T")


def make_app(models: list[Served], worker: Worker, limits: Limits, *, scorer: Scorer | None = None,
             api_key: str | None = None, is_local: bool = True) -> Guard:
    """The whole application; it starts no worker, and stops it at its own end."""
    server = Server(models, worker, limits, scorer)

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.stop)
        server.encoding.shutdown(cancel_futures=True)

    app = FastAPI(title="hybrid_rlhf", lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.get("/health")(server.health)
    app.get("/v1/models")(server.list_models)
    app.get("/v1/models/{name:path}")(server.show_model)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.complete)
    if scorer is not None:
        app.post("/score")(server.score)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _refused)
    if (PAGE / "index.html").exists():
        app.mount("/", with_policy(StaticFiles(directory=PAGE, html=True)))
    return Guard(app, api_key, is_local)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        what = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} does not fit here"}
        error = ApiError(error.status_code, what.get(error.status_code, str(error.detail)))
    elif not isinstance(error, ApiError):  # the guard logs it
        error = ApiError(500, f"an error of the server ({type(error).__name__}); its log says more")

    async def send_it(send: Send) -> None:
        await refuse(send, error)

    return Answer(send_it)


class Server:
    """The routes and what they share."""

    def __init__(self, models: list[Served], worker: Worker, limits: Limits, scorer: Scorer | None) -> None:
        self.models, self.worker, self.limits, self.scorer = {m.name: m for m in models}, worker, limits, scorer
        self.encoding = ThreadPoolExecutor(1, "encode")  # long prompts must not hold up others' tokens
        self._num_scoring = 0

    async def health(self) -> Response:
        state = {"status": "ok" if self.worker.is_alive else "stopped",
                 "reward_model": self.scorer is not None,
                 "models": {m.name: {"open": m.num_open, "slots": m.lane.num_slots} for m in self.models.values()}}
        return JSONResponse(state, 200 if self.worker.is_alive else 503)

    async def list_models(self) -> Response:
        return JSONResponse({"object": "list", "data": [_described(m) for m in self.models.values()]})

    async def show_model(self, name: str) -> Response:
        return JSONResponse(_described(self._model(name)))

    async def chat(self, request: Request) -> Response:
        arrived = time.monotonic()
        asked = read_chat(self._settled(await self._body(request)))
        model = self._model(asked.model)

        async def work(send: Send, submit: Callable[[Job], None]) -> None:
            prompt, text = await self._encode(self._prompt, model, asked)
            job = self._job(model, asked, [prompt], "messages")
            submit(job)
            await (stream if asked.is_stream else whole)(send, self._asking(model, asked, job, text))

        return self._answer(model, asked.num_choices, arrived, work)

    async def complete(self, request: Request) -> Response:
        arrived = time.monotonic()
        asked = read_completion(self._settled(await self._body(request)))
        model = self._model(asked.model)

        async def work(send: Send, submit: Callable[[Job], None]) -> None:
            prompts = await self._encode(given_prompts, model, asked, self.limits)
            job = self._job(model, asked, [prompt.ids for prompt in prompts], "prompt")
            if not asked.is_read_only:
                submit(job)
            await (stream_completion if asked.is_stream else whole_completion)(
                send, self._asking(model, asked, job, ""), prompts)

        return self._answer(model, asked.num_choices * len(asked.prompts), arrived, work)

    async def score(self, request: Request) -> Response:
        arrived = time.monotonic()
        prompts, completions = read_score(await self._body(request))
        if self._num_scoring >= self.limits.max_queue:
            raise ApiError(429, "too many requests for scores; try again", retry_after=1)
        self._num_scoring += 1

        async def work(send: Send) -> None:
            scores: list[float] = []
            try:
                await self._encode(self.scorer.check_lengths, prompts, completions)
                for part in self.scorer.parts(prompts, completions):
                    scores += await asyncio.wrap_future(self.worker.call(part))
            except UserError as error:
                raise ApiError(400, str(error)) from None
            except Stopping as error:
                raise ApiError(503, f"{error}; try again later", retry_after=30) from None
            await JSONResponse({"scores": scores})({"type": "http"}, None, send)

        def leave() -> None:
            self._num_scoring -= 1

        return Answer(work, leave, self.limits.request_seconds, arrived)

    # -- what a request needs ----------------------------------------------------------------------------------------

    async def _body(self, request: Request) -> dict:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a form or plain text is what a foreign web page may send unasked
            raise ApiError(415, "the body must be JSON (Content-Type: application/json)")
        return read_json(await read_body(request.receive, request.headers, self.limits.max_body_bytes, BODY_SECONDS))

    def _settled(self, found: dict) -> dict:
        """A body with the sampling settings that its model is published with, where it has none of its own. Requests
        for log-probabilities or the echo of a prompt measure the model as it is, without those."""
        if found.get("logprobs") or found.get("echo"):
            return found
        name = found.get("model") or next(iter(self.models), None)
        model = self.models.get(name) if isinstance(name, str) else None
        defaults = model.sampling if model else {}
        return found | {key: value for key, value in defaults.items() if found.get(key) is None}

    def _model(self, name: str | None) -> Served:
        if name is None and self.models:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(404, f"there is no model {name[:100] if name else ''!r}; there are "
                                f"{', '.join(self.models) or 'none'}", param="model", code="model_not_found")
        return self.models[name]

    def _answer(self, model: Served, count: int, arrived: float,
                work: Callable[[Send, Callable[[Job], None]], Awaitable[None]]) -> Answer:
        """What `work` sends, with places for `count` choices; it says which job its choices come from."""
        self._take_place(model, count)
        started, jobs = time.monotonic(), []

        def submit(job: Job) -> None:
            jobs.append(job)
            self.worker.submit(model.lane, job)

        def leave() -> None:
            model.num_open -= count
            model.seconds.append(time.monotonic() - started)
            for job in jobs:
                self.worker.drop(model.lane, job)

        return Answer(lambda send: work(send, submit), leave, self.limits.request_seconds, arrived)

    def _asking(self, model: Served, asked: ChatRequest | CompletionRequest, job: Job, text: str) -> Asking:
        return Asking(model, asked, job, text, lambda i: self.worker.drop(model.lane, job, range(i, i + 1)),
                      self._encode, lambda *given: asyncio.wrap_future(self.worker.score(model.lane, *given)))

    def _take_place(self, model: Served, count: int) -> None:
        if not self.worker.is_alive:
            raise ApiError(503, "the server stops or its engine has failed; try again later", retry_after=30)
        places = model.lane.num_slots + self.limits.max_queue
        if count > places:
            raise ApiError(400, f"{count} answers at once are more than the {places} that may run and wait; "
                                "send less, or start the server with a larger --max_queue", code="queue_full")
        if model.num_open + count > places:
            raise ApiError(429, f"{model.name} is busy with {model.num_open} requests; try again later",
                           code="queue_full", retry_after=model.wait())
        model.num_open += count

    async def _encode(self, function: Callable[..., T], *given: object) -> T:
        """`function` in the thread for prompts. Who has left while others are at it has no turn there."""
        return await asyncio.get_running_loop().run_in_executor(self.encoding, function, *given)

    def _prompt(self, model: Served, asked: ChatRequest) -> tuple[list[int], str]:
        """The messages as tokens, and as text. ApiError for more than fit, which often shows before they are
        tokenized."""
        if not model.encoder.chat_template:
            raise ApiError(400, f"{model.name} has no chat template, so it cannot chat; send a prompt to "
                                "/v1/completions", param="model")
        if asked.tools or asked.has_calls:
            model.check_tools("tools" if asked.tools else "messages")
        try:
            model.tell_unread(asked.messages)
            rendered = compose_prompt(model.encoder, asked.messages, asked.continues)
        except SkipRow as error:
            raise ApiError(400, f"these messages make no prompt: {error}; "
                                "send messages that the model's template takes", param="messages") from None
        what = "the messages and tools are" if asked.tools else "the messages are"
        check_length(model, self.limits, what, model.least_tokens.of(rendered), "or more ")
        prompt = encode_all(model.encoder, [rendered])[0].ids
        check_length(model, self.limits, what, len(prompt))
        return prompt, rendered.shown

    def _job(self, model: Served, asked: ChatRequest | CompletionRequest, prompts: list[list[int]],
             param: str) -> Job:
        """The requests of all choices, prompt by prompt; ApiError for one that cannot run."""
        if model.lane.serving is None:
            raise ApiError(503, "the engine starts again; try again", retry_after=1)
        requests = []
        for prompt in prompts:
            limit = min(asked.limit or self.limits.max_new_tokens, self.limits.max_new_tokens,
                        model.lane.capacity - len(prompt))
            sampling = replace(asked.sampling, max_new_tokens=limit, min_new_tokens=min(asked.least, limit))
            requests += [engine_request.Request(i, prompt, limit, asked.seed, sampling=sampling)
                         for i in range(asked.num_choices)]
            try:
                model.lane.serving.check(requests[-1])
            except UserError as error:
                raise ApiError(400, str(error), param=param) from None
        return Job(requests, asyncio.get_running_loop())


def _described(model: Served) -> dict:
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "hybrid_rlhf",
            "max_context": model.lane.capacity}
