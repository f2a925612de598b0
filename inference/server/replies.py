"""How an answer goes out: whole or as a stream, and no longer than its client is there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hybrid_rlhf.inference.response_text import AnswerText
from hybrid_rlhf.inference.sequence_scores import ScoredToken
from hybrid_rlhf.inference.server.answer_shapes import ChatShapes, answered_calls, chat_logprobs, event
from hybrid_rlhf.inference.server.protocol import ApiError, ChatRequest
from hybrid_rlhf.inference.server.served_model import Served
from hybrid_rlhf.inference.server.worker import Job, Stopping
from hybrid_rlhf.inference.turn_text import TurnText
from hybrid_rlhf.models.tool_calls import ParsedTurn, parse_turn

if TYPE_CHECKING:
    from hybrid_rlhf.inference.server.completion_protocol import CompletionRequest

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


@dataclass(frozen=True)
class Asking:
    """One request under way. prompt: its text, of a chat. drop: forget one of its choices. encode: a call in the thread
    for prompts. score: SequenceScorer.score, in turn."""

    model: Served
    asked: ChatRequest | CompletionRequest
    job: Job
    prompt: str
    drop: Callable[[int], None]
    encode: Callable[..., Awaitable[Any]]
    score: Callable[..., Awaitable[list[ScoredToken]]]

    @property
    def ends(self) -> frozenset[int]:
        return self.model.lane.serving.stops if self.model.lane.serving else frozenset()

    def text(self, prompt: Sequence[int]) -> AnswerText | TurnText:
        """The text of one choice behind `prompt`, of which nothing has come."""
        before = prompt if self.asked.goes_on else ()
        text = AnswerText(self.model.tokenizer, self.asked.stops, self.ends, before,
                          is_turn=not self.asked.goes_on)
        return TurnText(self.model.tokenizer, text, self.prompt) if self.asked.tools else text

    async def parse(self, ids: list[int]) -> ParsedTurn:
        return await self.encode(parse_turn, self.model.encoder, ids, self.asked.tools, self.prompt)

    async def scores(self, ids: list[int], first: int, with_next: bool = False) -> list[ScoredToken]:
        """Of ids[first:]; ApiError where that fails."""
        try:
            return await self.score(ids, first, self.asked.num_top, with_next)
        except Exception as error:
            raise failure(error) from None


class Piece(NamedTuple):
    """What is new of a choice: text or "", why it has ended or None, and then its tool calls in OpenAI's shape.

    Where log-probabilities are asked for: said, (first, end) of the tokens whose text this piece says; ending, the
    token without text behind them that ended the answer; offsets, where in the choice's text each of these begins.
    """

    index: int
    text: str
    reason: str | None = None
    calls: Sequence[dict] = ()
    said: tuple[int, int] = (0, 0)
    offsets: Sequence[int] = ()
    ending: Sequence[int] = ()


def failure(error: Exception) -> ApiError:
    return ApiError(503 if isinstance(error, Stopping) else 500, f"the answer failed: {error}; try again")


async def pieces_of(asking: Asking, counts: list[int]) -> AsyncIterator[Piece]:
    """The pieces as they come; counts: tokens of each choice, kept up to date."""
    ends, texts = asking.ends, [asking.text(request.prompt) for request in asking.job.requests]
    num_left, num_said = len(texts), [0] * len(texts)
    while num_left:
        news = await asking.job.events.get()
        if isinstance(news, Exception):
            raise failure(news) from None
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
        new = Piece(index, piece, reason)
        if asking.asked.num_top is not None:
            first, num_said[index] = num_said[index], text.num_said(is_last)
            ending = tokens[-1:] if is_last and tokens[-1] in ends and not text.has_stopped else []
            offsets = text.offsets[first : num_said[index]] + [text.length] * len(ending)
            new = new._replace(said=(first, num_said[index]), offsets=offsets, ending=ending)
        yield await _ended(asking, text, new) if reason else new


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


@dataclass
class Choice:
    """A whole answer. tokens: those that its text says; ending and offsets: as of a Piece."""

    text: str = ""
    reason: str | None = None
    calls: Sequence[dict] = ()
    tokens: Sequence[int] = ()
    offsets: Sequence[int] = ()
    ending: Sequence[int] = ()


async def choices_of(asking: Asking, counts: list[int]) -> list[Choice]:
    """All answers, once the last of them has ended."""
    choices = [Choice() for _ in asking.job.requests]
    async for piece in pieces_of(asking, counts):
        choice, tokens = choices[piece.index], asking.job.requests[piece.index].tokens
        choice.text += piece.text
        choice.reason, choice.calls = choice.reason or piece.reason, choice.calls or piece.calls
        choice.tokens, choice.offsets = [*choice.tokens, *tokens[slice(*piece.said)]], [*choice.offsets, *piece.offsets]
        choice.ending = choice.ending or piece.ending
    return choices


def drawn(asking: Asking, piece: Piece, with_ending: bool = False) -> list[ScoredToken]:
    """The tokens that a piece of a stream says, as the sampler drew them."""
    request, (first, end) = asking.job.requests[piece.index], piece.said
    return [ScoredToken(request.tokens[i], request.logprobs[i])
            for i in range(first, end + len(piece.ending) * with_ending)]


async def whole(send: Send, asking: Asking) -> None:
    requests = asking.job.requests
    counts = [0] * len(requests)
    choices = await choices_of(asking, counts)
    logprobs: list[dict | None] = [None] * len(choices)
    if asking.asked.num_top is not None:
        for i, (request, choice) in enumerate(zip(requests, choices, strict=True)):
            scored = await asking.scores([*request.prompt, *choice.tokens], len(request.prompt))
            logprobs[i] = await asking.encode(chat_logprobs, asking.model.token_text, scored)
    found = ChatShapes(asking.model.name).whole([(c.text, c.calls) for c in choices], [c.reason for c in choices],
                                                (len(requests[0].prompt), sum(counts)), logprobs)
    await JSONResponse(found)({"type": "http"}, None, send)


async def stream(send: Send, asking: Asking) -> None:
    shapes, texts = ChatShapes(asking.model.name), asking.model.token_text
    counts = [0] * len(asking.job.requests)

    def begin() -> bytes:
        return b"".join(event(shapes.chunk(i, {"role": "assistant", "content": ""})) for i in range(len(counts)))

    def shown(piece: Piece) -> bytes:
        written = b""
        if piece.text or piece.said[0] < piece.said[1]:
            logprobs = None if asking.asked.num_top is None else chat_logprobs(texts, drawn(asking, piece))
            written += event(shapes.chunk(piece.index, {"content": piece.text}, logprobs=logprobs))
        for i, call in enumerate(piece.calls):
            written += event(shapes.chunk(piece.index, {"tool_calls": [{"index": i, **call}]}))
        return written + (event(shapes.chunk(piece.index, {}, piece.reason)) if piece.reason else b"")

    await stream_events(send, asking, counts, begin(), shown,
                        lambda: shapes.usage_chunk((len(asking.job.requests[0].prompt), sum(counts))))


async def stream_events(send: Send, asking: Asking, counts: list[int], begin: bytes, shown: Callable[[Piece], bytes],
                        used: Callable[[], dict]) -> None:
    """A stream of events: `begin`, each piece as it is shown, and at the end what was used, if asked for."""
    written = bytearray(begin)

    async def put() -> None:
        await send({"type": "http.response.body", "body": bytes(written), "more_body": True})
        written.clear()

    await send({"type": "http.response.start", "status": 200, "headers": [
        EVENTS, (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no")]})
    await put()
    try:
        async for piece in pieces_of(asking, counts):
            written += shown(piece)
            if written and asking.job.events.empty():  # else more is on its way: writing is most of what an event costs
                await put()
        if asking.asked.wants_usage:
            written += event(used())
        written += b"data: [DONE]\n\n"
    except ApiError as error:
        written += event(error.body())
    await send({"type": "http.response.body", "body": bytes(written)})
