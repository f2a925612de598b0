"""Routes of a server whose model learns (serve --learn): marks on its answers, each of which trains it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.memory import explained
from hybrid_rlhf.inference.server.protocol import ApiError, read_json, read_mark
from hybrid_rlhf.inference.server.worker import Stopping, Worker
from hybrid_rlhf.inference.teaching import Learning, learn, saved


def add(app: FastAPI, learner: Learning, worker: Worker) -> None:
    """All answers are {"marks": [{"kind", "sign", "question", "answer"}], "line": what changed, or ""}."""

    async def done(function: Callable[[], str], call: Callable = worker.call_outside) -> JSONResponse:
        def explain() -> dict:
            with explained("while learning", "the marks before it are kept; say less, or take a smaller model"):
                return told(function())

        try:
            return JSONResponse(await asyncio.wrap_future(call(explain)))
        except UserError as error:
            raise ApiError(400, str(error)) from None
        except Stopping as error:
            raise ApiError(503, f"{error}; the marks so far are kept", retry_after=30) from None

    def told(line: str) -> dict:
        return {"line": line, "marks": [{"kind": mark.kind, "sign": mark.sign, "question": mark.prompt[-1]["content"],
                                         "answer": mark.answer} for mark in learner.marks]}

    @app.get("/v1/marks")
    async def listed() -> JSONResponse:
        return await done(str, worker.call)  # behind a mark that is being learnt

    @app.post("/v1/marks")
    async def mark(request: Request) -> JSONResponse:
        on_answer = read_mark(read_json(await request.body()))
        return await done(lambda: learn(learner, on_answer))

    @app.post("/v1/marks/undo")
    async def undo(request: Request) -> JSONResponse:
        body = read_json(await request.body())

        def taken_back() -> str:
            count = len(learner.marks)
            last = learner.marks[-1].answer if count else None
            check(body.get("number") == count and body.get("answer", last) == last,
                  f"only the last mark can be taken back, and that is mark {count}: {last}")
            learner.undo()
            return f"mark {count} is taken back; weights and optimizer are those from before it"

        return await done(taken_back)

    @app.post("/v1/marks/save")
    async def save() -> JSONResponse:
        return await done(lambda: saved(learner))
