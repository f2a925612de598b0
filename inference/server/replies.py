"""How an answer goes out: whole or as a stream, and no longer than its client is there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hybrid_rlhf.inference.response_text import AnswerText
from hybrid_rlhf.inference.server.protocol import ApiError, ChatRequest, Shapes, answered_calls, event
from hybrid_rlhf.inference.server.served_model import Served
from hybrid_rlhf.inference.server.worker import Job, Stopping
from hybrid_rlhf.inference.turn_text import TurnText
from hybrid_rlhf.models.tool_calls import ParsedTurn, parse_turn

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class Answer(Response):
    """A response that `work` sends. It is cancelled when the client leaves, when the time is up (`seconds` from
    `arrived`, of time.monotonic) and when the server stops; then `at_end` is called, however it ended. A stream that
    has begun ends with the error as its last event."""

    def __init__(self, work: Callable[[Send], Awaitable[None]], at_end: Callable[[], None] = lambda: None,
                 seconds: float = math.inf, arrived: float = 0.0) -> None:
        self._work, self._at_end, self._seconds, self._arrived = work, at_end, seconds, arrived
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] | None = None

        async def noted(message: Message) -> None:
            nonlocal headers
            headers = message.get("headers", headers)
            await send(message)

        error = await self._end(asyncio.ensure_future(self._work(noted)), asyncio.ensure_future(_until_gone(receive)))
        if error is not None and headers is None:
            raise error
        if error is not None and EVENTS in headers:
            await send({"type": "http.response.body", "body": event(error.body())})

    async def _end(self, working: asyncio.Future, leaving: asyncio.Future) -> ApiError | None:
        """Wait for the first of them; what the client is yet to be told."""
        left = None if self._seconds == math.inf else self._arrived + self._seconds - time.monotonic()
        try:
            await asyncio.wait({working, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            elif not leaving.done():
                return ApiError(504, f"no whole answer within {self._seconds:g} s; "
                                     "ask for fewer tokens, or start the server with a larger --request_timeout",
                                code="timeout")
        except ApiError as error:
            return error
        except asyncio.CancelledError:  # by uvicorn, which has waited for as long as it does for open answers
            return ApiError(503, "the server stops; try again later", retry_after=30)
        finally:
            for task in (working, leaving):
                task.cancel()
            self._at_end()
            with suppress(asyncio.CancelledError):  # a second one: a server that is told twice to stop waits no more
                await asyncio.gather(working, leaving, return_exceptions=True)
        return None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Asking(NamedTuple):
    """One request under way. prompt: its text. drop: forget one of its choices. encode: a call in the thread for
    prompts."""

    model: Served
    asked: ChatRequest
    job: Job
    prompt: str
    drop: Callable[[int], None]
    encode: Callable[..., Awaitable[ParsedTurn]]

    @property
    def ends(self) -> frozenset[int]:
        return self.model.lane.serving.stops if self.model.lane.serving else frozenset()

    def text(self) -> AnswerText | TurnText:
        """The text of one choice, of which nothing has come."""
        text = AnswerText(self.model.tokenizer, self.asked.stops, self.ends)
        return TurnText(self.model.tokenizer, text, self.prompt) if self.asked.tools else text

    async def parse(self, ids: list[int]) -> ParsedTurn:
        return await self.encode(parse_turn, self.model.encoder, ids, self.asked.tools, self.prompt)


class Piece(NamedTuple):
    """What is new of a choice: text or "", why it has ended or None, and then its tool calls in OpenAI's shape."""

    index: int
    text: str
    reason: str | None = None
    calls: Sequence[dict] = ()


async def _pieces(asking: Asking, counts: list[int]) -> AsyncIterator[Piece]:
    """The pieces as they come; counts: tokens of each choice, kept up to date."""
    ends, texts = asking.ends, [asking.text() for _ in asking.job.requests]
    num_left = len(texts)
    while num_left:
        news = await asking.job.events.get()
        if isinstance(news, Exception):
            status = 503 if isinstance(news, Stopping) else 500
            raise ApiError(status, f"the answer failed: {news}; try again") from None
        index, tokens, is_last = news
        text = texts[index]
        if text.has_stopped:
            yield Piece(index, "")
            continue
        piece = text.push(tokens, is_last)
        counts[index] = text.num_tokens
        reason = None
        if text.has_stopped:
            asking.drop(index)
            reason = "stop"
        elif is_last:
            reason = "stop" if tokens[-1] in ends else "length"
        num_left -= reason is not None
        yield await _ended(asking, text, Piece(index, piece, reason)) if reason else Piece(index, piece)


async def _ended(asking: Asking, text: AnswerText | TurnText, last: Piece) -> Piece:
    """The last piece with the calls of its turn, or with the text that was held back where it has none."""
    if not isinstance(text, TurnText):
        return last
    turn = await asking.parse(text.ids)
    try:
        calls = answered_calls(turn.message.get("tool_calls", ()))
    except ValueError:  # a number that JSON has no word for
        calls = []
    if not calls:
        return last._replace(text=last.text + text.held)
    return last._replace(text=last.text + text.behind_calls(turn.message["content"]), calls=calls,
                         reason="tool_calls" if last.reason == "stop" else last.reason)


async def whole(send: Send, asking: Asking) -> None:
    num_choices = len(asking.job.requests)
    texts, calls, reasons, counts = ([empty] * num_choices for empty in ("", (), None, 0))
    async for piece in _pieces(asking, counts):
        index = piece.index
        texts[index] += piece.text
        reasons[index], calls[index] = reasons[index] or piece.reason, calls[index] or piece.calls
    found = Shapes(asking.model.name).whole(list(zip(texts, calls, strict=True)), reasons,
                                            (len(asking.job.requests[0].prompt), sum(counts)))
    await JSONResponse(found)({"type": "http"}, None, send)


async def stream(send: Send, asking: Asking) -> None:
    job, shapes = asking.job, Shapes(asking.model.name)
    counts = [0] * len(job.requests)
    written = bytearray()

    async def put() -> None:
        await send({"type": "http.response.body", "body": bytes(written), "more_body": True})
        written.clear()

    await send({"type": "http.response.start", "status": 200, "headers": [
        EVENTS, (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no")]})
    for index in range(len(job.requests)):
        written += event(shapes.chunk(index, {"role": "assistant", "content": ""}))
    await put()
    try:
        async for piece in _pieces(asking, counts):
            if piece.text:
                written += event(shapes.chunk(piece.index, {"content": piece.text}))
            for i, call in enumerate(piece.calls):
                written += event(shapes.chunk(piece.index, {"tool_calls": [{"index": i, **call}]}))
            if piece.reason:
                written += event(shapes.chunk(piece.index, {}, piece.reason))
            if written and job.events.empty():  # else more is on its way: writing is most of what an event costs
                await put()
        if asking.asked.wants_usage:
            written += event(shapes.usage_chunk((len(job.requests[0].prompt), sum(counts))))
        written += b"data: [DONE]\n\n"
    except ApiError as error:
        written += event(error.body())
    await send({"type": "http.response.body", "body": bytes(written)})
