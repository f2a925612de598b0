"""How an answer goes out: whole or as a stream, and no longer than its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybrid_rlhf.inference.response_text import AnswerText
from hybrid_rlhf.inference.server.protocol import ApiError, ChatRequest, Shapes, event
from hybrid_rlhf.inference.server.served_model import Served
from hybrid_rlhf.inference.server.worker import Job


class Answer(Response):
    """A response that `work` sends. It is cancelled when the client leaves or the time is up; then `at_end` is called,
    however it ended."""

    def __init__(self, work: Callable[[Send], Awaitable[None]], at_end: Callable[[], None] = lambda: None,
                 seconds: float | None = None) -> None:
        self._work, self._at_end, self._seconds = work, at_end, seconds
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(self._work(send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({working, leaving}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            elif not leaving.done():
                raise ApiError(504, f"no whole answer within {self._seconds:g} s; "
                                    "ask for fewer tokens, or start the server with a larger --request_timeout",
                               code="timeout")
        finally:
            for task in (working, leaving):
                task.cancel()
            self._at_end()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pieces(model: Served, asked: ChatRequest, job: Job, drop: Callable[[int], None],
                  counts: list[int]) -> AsyncIterator[tuple[int, str, str | None]]:
    """(choice, new text or "", why it has ended or None) as they come; counts: tokens of each choice, kept up to
    date."""
    ends = model.lane.serving.stops if model.lane.serving else frozenset()
    texts = [AnswerText(model.tokenizer, asked.stops, ends) for _ in job.requests]
    num_left = len(texts)
    while num_left:
        news = await job.events.get()
        if isinstance(news, Exception):
            raise ApiError(503 if "stops" in str(news) else 500, f"the answer failed: {news}; try again") from None
        index, tokens, is_last = news
        text = texts[index]
        if text.has_stopped:
            yield index, "", None
            continue
        piece = text.push(tokens, is_last)
        counts[index] = text.num_tokens
        reason = None
        if text.has_stopped:
            drop(index)
            reason = "stop"
        elif is_last:
            reason = "stop" if tokens[-1] in ends else "length"
        num_left -= reason is not None
        yield index, piece, reason


async def whole(send: Send, model: Served, asked: ChatRequest, job: Job, drop: Callable[[int], None]) -> None:
    texts, reasons, counts = ([empty] * len(job.requests) for empty in ("", None, 0))
    async for index, piece, reason in _pieces(model, asked, job, drop, counts):
        texts[index] += piece
        reasons[index] = reasons[index] or reason
    found = Shapes(model.name).whole(texts, reasons, (len(job.requests[0].prompt), sum(counts)))
    await JSONResponse(found)({"type": "http"}, None, send)


async def stream(send: Send, model: Served, asked: ChatRequest, job: Job, drop: Callable[[int], None]) -> None:
    shapes, counts = Shapes(model.name), [0] * len(job.requests)

    written = bytearray()

    async def put() -> None:
        await send({"type": "http.response.body", "body": bytes(written), "more_body": True})
        written.clear()

    await send({"type": "http.response.start", "status": 200, "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no")]})
    for index in range(len(job.requests)):
        written += event(shapes.chunk(index, {"role": "assistant", "content": ""}))
    await put()
    try:
        async for index, piece, reason in _pieces(model, asked, job, drop, counts):
            if piece:
                written += event(shapes.chunk(index, {"content": piece}))
            if reason:
                written += event(shapes.chunk(index, {}, reason))
            if written and job.events.empty():  # else more is on its way: writing is most of what an event costs
                await put()
        if asked.wants_usage:
            written += event(shapes.usage_chunk((len(job.requests[0].prompt), sum(counts))))
        written += b"data: [DONE]\n\n"
    except ApiError as error:
        written += event(error.body())
    await send({"type": "http.response.body", "body": bytes(written)})
