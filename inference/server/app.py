"""The application: chat completions, completions, models and health, and /score where there is a reward model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Send

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.errors import present
from hybrid_rlhf.engine.decode import request as engine_request
from hybrid_rlhf.inference.scorer import Scorer
from hybrid_rlhf.inference.server import mark_routes
from hybrid_rlhf.inference.server.choices import Asking
from hybrid_rlhf.inference.server.guard import Guard, error_response
from hybrid_rlhf.inference.server.page_policy import with_policy
from hybrid_rlhf.inference.server.protocol import (
    ApiError,
    GenerationRequest,
    read_chat,
    read_completion,
    read_json,
    read_score,
)
from hybrid_rlhf.inference.server.replies import Answer, reply
from hybrid_rlhf.inference.server.served_model import Limits, Prompt, Served
from hybrid_rlhf.inference.server.worker import GenerationJob, Stopping, Worker
from hybrid_rlhf.inference.teaching import Learning

PAGE = Path(__file__).parent / "page"
T = TypeVar("T")


def make_app(models: list[Served], worker: Worker, limits: Limits, *, scorer: Scorer | None = None,
             api_key: str | None = None, is_local: bool = True, learner: Learning | None = None) -> Guard:
    """The complete application. It does not start the worker, and stops it on shutdown. learner: of its one model."""
    server = Server(models, worker, limits, scorer)

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        with TemporaryDirectory(prefix="hybrid_rlhf_images_") as folder:
            server.images = Path(folder).absolute()
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
    if learner is not None:
        mark_routes.add(app, learner, worker)
    for kind in (ApiError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, _refused)
    app.mount("/", with_policy(StaticFiles(directory=PAGE, html=True)))
    return Guard(app, api_key, is_local, limits.max_body_bytes)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        texts = {404: f"there is no {request.url.path[:200]}", 405: f"{request.method} does not fit here"}
        error = ApiError(error.status_code, texts.get(error.status_code, str(error.detail)))
    elif isinstance(error, RecursionError):  # a template that recurses through nested lists of the client
        error = ApiError(400, "the request is nested too deeply; send flatter values")
    elif not isinstance(error, ApiError):  # logged by uvicorn
        error = ApiError(500, f"an error of the server ({type(error).__name__}); its log says more")
    return error_response(error)


class Server:
    """The routes and their shared state."""

    def __init__(self, models: list[Served], worker: Worker, limits: Limits, scorer: Scorer | None) -> None:
        self.models, self.worker, self.limits, self.scorer = {m.name: m for m in models}, worker, limits, scorer
        self.encoding = ThreadPoolExecutor(1, "encode")  # long prompts must not block the tokens of others
        self._num_scoring = 0
        self.images: Path | None = None  # for files of requests' images, while the application runs
        self._used: Counter[str] = Counter()  # in that folder, by how many requests

    async def health(self) -> Response:
        state = {"status": "ok" if self.worker.is_alive else "stopped",
                 "reward_model": self.scorer is not None,
                 "models": {m.name: {"open": m.num_open, "slots": m.lane.num_slots} for m in self.models.values()}}
        return JSONResponse(state, 200 if self.worker.is_alive else 503)

    async def list_models(self) -> Response:
        return JSONResponse({"object": "list", "data": [m.described() for m in self.models.values()]})

    async def show_model(self, name: str) -> Response:
        return JSONResponse(self._model(name).described())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, read_chat)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, read_completion)

    async def _generate(self, request: Request, read: Callable[[dict], GenerationRequest]) -> Response:
        arrived = time.monotonic()
        asked = read(self._with_defaults(read_json(await request.body())))
        model = self._model(asked.model)
        count = asked.num_choices * max(1, len(asked.prompts))
        self._take_place(model, count)
        started, jobs, files = time.monotonic(), list[GenerationJob](), list[str]()

        async def work(send: Send) -> None:
            prompts = await self._encode(self._prompts, model, asked, files)
            job = self._job(model, asked, prompts)
            if not asked.is_read_only:
                jobs.append(job)
                self.worker.submit(model.lane, job)
            await reply(send, Asking(model, asked, prompts, job, self.worker, self._encode))

        def leave() -> None:
            model.num_open -= count
            model.seconds.append(time.monotonic() - started)
            for job in jobs:
                self.worker.drop(model.lane, job)
            with suppress(RuntimeError):  # at the server's end, when the folder goes
                self.encoding.submit(self._forget, files)

        return Answer(work, leave, self.limits.request_seconds, arrived)

    async def score(self, request: Request) -> Response:
        arrived = time.monotonic()
        prompts, completions = read_score(read_json(await request.body()))
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

    # -- parts of a request -----------------------------------------------------------------------------------------

    def _with_defaults(self, data: dict) -> dict:
        """A body with defaults for missing sampling settings: those published with its model. Not for requests of
        log-probabilities or the echo of a prompt, which measure the model itself."""
        if data.get("logprobs") or data.get("echo"):
            return data
        name = data.get("model") or next(iter(self.models), None)
        model = self.models.get(name) if isinstance(name, str) else None
        defaults = model.sampling if model else {}
        return data | {key: value for key, value in defaults.items() if data.get(key) is None}

    def _model(self, name: str | None) -> Served:
        if name is None and self.models:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(404, f"there is no model {name[:100] if name else ''!r}; there are "
                                f"{', '.join(self.models) or 'none'}", param="model", code="model_not_found")
        return self.models[name]

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

    async def _encode(self, function: Callable[..., T], *inputs: object) -> T:
        """Run `function` in the thread for prompts; it is skipped if the client has disconnected before."""
        return await asyncio.get_running_loop().run_in_executor(self.encoding, function, *inputs)

    def _prompts(self, model: Served, asked: GenerationRequest, files: list[str]) -> list[Prompt]:
        """The prompts of a request; the files of their images are added to `files`, for `_forget`."""
        prompts = model.prompts(asked, self.limits, present(self.images, "the folder for images"))
        files += [image.path for prompt in prompts for image in prompt.images]
        self._used.update(files)
        return prompts

    def _forget(self, files: list[str]) -> None:
        """Remove the images that no request uses any more. In the thread for prompts, after those of the request."""
        self._used -= Counter(files)
        for path in self.images.iterdir() if self.images else ():
            if str(path) not in self._used:
                path.unlink(missing_ok=True)

    def _job(self, model: Served, asked: GenerationRequest, prompts: list[Prompt]) -> GenerationJob:
        """The requests of all choices, prompt by prompt; ApiError for one that cannot run."""
        serving, requests = model.lane.running(), []
        for prompt in prompts:
            limit = min(asked.limit or self.limits.max_new_tokens, self.limits.max_new_tokens,
                        model.lane.capacity - len(prompt.ids))
            sampling = replace(asked.sampling, max_new_tokens=limit, min_new_tokens=min(asked.least, limit))
            requests += [engine_request.Request(i, prompt.ids, limit, asked.seed, sampling=sampling)
                         for i in range(asked.num_choices)]
            try:
                serving.check(requests[-1])
            except UserError as error:
                raise ApiError(400, str(error), param="messages" if asked.is_chat else "prompt") from None
        return GenerationJob(requests, asyncio.get_running_loop())
