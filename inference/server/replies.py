"""Send answers in OpenAI's shapes, as one response or as a stream, and cancel them when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hybrid_rlhf.inference.sequence_scores import ScoredToken, TokenText
from hybrid_rlhf.inference.server.choices import Asking, Piece, Scored, choices_of, pieces_of, read_choice, scored
from hybrid_rlhf.inference.server.protocol import ApiError

EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_LEAST = -9999.0  # OpenAI's value for minus infinity, which JSON has not


class Answer(Response):
    """A response that `work` sends. It is cancelled when the client disconnects, after a timeout (`seconds` from
    `arrived`, of time.monotonic) and when the server stops; `at_end` is called in any case. A started stream ends with
    the error as its last event."""

    def __init__(self, work: Callable[[Send], Awaitable[None]], at_end: Callable[[], None], seconds: float,
                 arrived: float) -> None:
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
            await send({"type": "http.response.body", "body": _event(error.body())})

    async def _end(self, working: asyncio.Future, leaving: asyncio.Future) -> ApiError | None:
        """Wait for the first of both; returns an error to be sent to the client."""
        left = self._arrived + self._seconds - time.monotonic()
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
        except asyncio.CancelledError:  # by uvicorn, after its timeout for open answers
            return ApiError(503, "the server stops; try again later", retry_after=30)
        finally:
            for task in (working, leaving):
                task.cancel()
            self._at_end()
            with suppress(asyncio.CancelledError):  # a second one: a server that is stopped twice does not wait
                await asyncio.gather(working, leaving, return_exceptions=True)
        return None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(send: Send, asking: Asking) -> None:
    """Send the answer to a chat or a completion, as a stream or as one response."""
    shapes = ChatShapes(asking) if asking.asked.is_chat else CompletionShapes(asking)
    await (_stream if asking.asked.is_stream else _whole)(send, asking, shapes)


async def _whole(send: Send, asking: Asking, shapes: ChatShapes | CompletionShapes) -> None:
    counts = [0] * len(asking.job.requests)
    if asking.asked.is_read_only:
        read = [await read_choice(asking, i) for i in range(0, len(counts), asking.asked.num_choices)]
        answers = [(choice._replace(index=choice.index + i), scores) for choice, scores in read
                   for i in range(asking.asked.num_choices)]
        counts = [len(choice.drawn) for choice, _ in answers]
    else:
        answers = [(choice, await scored(asking, choice)) for choice in await choices_of(asking, counts)]

    def body() -> dict:
        return shapes.whole([shapes.choice(*answer) for answer in answers], _usage(asking, counts))

    # lists of log-probabilities are long: they are made outside of the event loop
    await JSONResponse(body() if asking.asked.num_top is None else await asking.encode(body))(
        {"type": "http"}, None, send)


async def _stream(send: Send, asking: Asking, shapes: ChatShapes | CompletionShapes) -> None:
    """A stream of events: the beginning of each choice, the pieces, and the usage at the end, if requested."""
    counts = [0] * len(asking.job.requests)
    written = bytearray(b"".join(_event(chunk) for i in range(len(counts)) for chunk in shapes.begin(i)))

    async def put() -> None:
        await send({"type": "http.response.body", "body": bytes(written), "more_body": True})
        written.clear()

    await send({"type": "http.response.start", "status": 200,
                "headers": [EVENTS, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]})
    await put()
    try:
        async for piece in pieces_of(asking, counts):
            written += b"".join(map(_event, shapes.chunks(piece)))
            if written and asking.job.events.empty():  # else collect more: writing is the main cost of an event
                await put()
        if asking.asked.wants_usage:
            written += _event(shapes.usage_chunk(_usage(asking, counts)))
        written += b"data: [DONE]\n\n"
    except ApiError as error:
        written += _event(error.body())
    await send({"type": "http.response.body", "body": bytes(written)})


def _event(data: dict) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _usage(asking: Asking, counts: list[int]) -> dict:
    num_prompt, num_drawn = sum(len(prompt.ids) for prompt in asking.prompts), sum(counts)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_drawn, "total_tokens": num_prompt + num_drawn}


# -- OpenAI's shapes ---------------------------------------------------------------------------------------------------


class ChatShapes:
    """The response objects of one chat completion, all with one id."""

    def __init__(self, asking: Asking) -> None:
        self._texts, self._has_logprobs = asking.model.token_text, asking.asked.num_top is not None
        self._frame = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()),
                       "model": asking.model.name}

    def _chunk(self, index: int, delta: dict, reason: str | None = None, logprobs: dict | None = None) -> dict:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._frame | {"object": "chat.completion.chunk", "choices": [choice]}

    def begin(self, index: int) -> list[dict]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def chunks(self, piece: Piece) -> list[dict]:
        chunks = []
        if piece.text or piece.drawn:
            logprobs = chat_logprobs(self._texts, piece.drawn) if self._has_logprobs else None
            chunks.append(self._chunk(piece.index, {"content": piece.text}, logprobs=logprobs))
        chunks += [self._chunk(piece.index, {"tool_calls": [{"index": i, **call}]})
                   for i, call in enumerate(piece.calls)]
        return [*chunks, self._chunk(piece.index, {}, piece.reason)] if piece.reason else chunks

    def usage_chunk(self, used: dict) -> dict:
        return self._frame | {"object": "chat.completion.chunk", "choices": [], "usage": used}

    def choice(self, choice: Piece, scores: Scored | None) -> dict:
        message: dict = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": choice.calls}
        return {"index": choice.index, "message": message, "finish_reason": choice.reason,
                "logprobs": None if scores is None else chat_logprobs(self._texts, scores)}

    def whole(self, choices: list[dict], used: dict) -> dict:
        return self._frame | {"object": "chat.completion", "choices": choices, "usage": used}


class CompletionShapes:
    """The response objects of one completion; chunks have the shape of a full response."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self._has_logprobs = asking, asking.asked.num_top is not None
        self._texts = asking.model.token_text
        self._frame = {"id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": int(time.time()),
                       "model": asking.model.name}

    def _chunk(self, index: int, text: str, reason: str | None = None, logprobs: dict | None = None) -> dict:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._frame | {"choices": [choice]}

    def begin(self, index: int) -> list[dict]:
        return [self._chunk(index, self._asking.prompt(index).text)] if self._asking.asked.has_echo else []

    def chunks(self, piece: Piece) -> list[dict]:
        if not (piece.text or piece.reason):
            return []
        logprobs = completion_logprobs(self._texts, [*piece.drawn, *piece.ending], piece.offsets) \
            if self._has_logprobs else None
        return [self._chunk(piece.index, piece.text, piece.reason, logprobs)]

    def usage_chunk(self, used: dict) -> dict:
        return self.whole([], used)

    def choice(self, choice: Piece, scores: Scored | None) -> dict:
        prompt, has_echo = self._asking.prompt(choice.index), self._asking.asked.has_echo
        before, logprobs = prompt.text if has_echo else "", None
        if scores is not None:
            offsets = prompt.offsets(self._asking.model.encoder) if has_echo else []
            offsets += [len(before) + offset for offset in choice.offsets]
            logprobs = completion_logprobs(self._texts, scores, offsets)
        return self._chunk(choice.index, before + choice.text, choice.reason, logprobs)["choices"][0]

    def whole(self, choices: list[dict], used: dict) -> dict:
        return self._frame | {"choices": choices, "usage": used}


def chat_logprobs(texts: TokenText, scores: Sequence[ScoredToken]) -> dict:
    """`choices[].logprobs` of a chat completion or of a chunk of its stream."""

    def shown(token: int, logprob: float) -> dict:
        text, data = texts.of(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": data}

    return {"content": [shown(score.token, score.logprob) | {"top_logprobs": [shown(*pair) for pair in score.top]}
                        for score in scores], "refusal": None}


def completion_logprobs(texts: TokenText, scores: Sequence[ScoredToken | int], offsets: Sequence[int]) -> dict:
    """`choices[].logprobs` of a completion. scores: the first token of a prompt is its id alone, with null as its
    log-probability. offsets: where in the choice's text each token begins.

    Top tokens are a dict by text, which includes the token itself; of two tokens with equal text it has the likelier.
    """

    def tops(score: ScoredToken) -> dict[str, float]:
        logprobs: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            logprobs.setdefault(texts.of(token)[0], max(logprob, _LEAST))
        return logprobs

    return {"tokens": [texts.of(score if isinstance(score, int) else score.token)[0] for score in scores],
            "token_logprobs": [None if isinstance(score, int) else max(score.logprob, _LEAST) for score in scores],
            "top_logprobs": [None if isinstance(score, int) else tops(score) for score in scores],
            "text_offset": list(offsets)}
