"""Requests of the page to the chat's own process, and its answers back, as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hybrid_rlhf.studio.studio import Refused

MAX_BODY = 2**20  # bytes: the server's own limit
MAX_ANSWER = 2**23  # bytes of an answer that comes whole
SILENCE_SECONDS = 330.0  # the server's patience with an answer is 300
_RETURNED = ("content-type", "retry-after")
_EVENTS = "text/event-stream"


async def body_of(request: Request) -> bytes:
    """Refused for more than MAX_BODY."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Refused(413, "the conversation is too large; start a new one")
    return bytes(body)


class PassThrough(Response):
    """What the server at `url` answers to a request with this body, token by token where it streams. Of the page's
    headers it sees the content type alone. A reader who leaves ends the request there too, before its first token as
    well. using: a block around all of it."""

    def __init__(self, method: str, url: str, key: str, body: bytes, content_type: str | None,
                 using: Callable[[], AbstractContextManager]) -> None:
        headers = {"authorization": f"Bearer {key}"} | ({"content-type": content_type} if content_type else {})
        self._request, self._using = httpx.Request(method, url, headers=headers, content=body), using
        self.background = None

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        with self._using():
            working = asyncio.ensure_future(self._answer(send))
            leaving = asyncio.ensure_future(_until_gone(receive))
            try:
                await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                for task in (working, leaving):
                    task.cancel()
                await asyncio.gather(working, leaving, return_exceptions=True)

    async def _answer(self, send: Send) -> None:
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=5.0)
        has_begun = False
        # no proxy of the environment's, and no certificates, which take long to read: it is this machine
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=False) as client:
            try:
                found = await client.send(self._request, stream=True)
                if not found.headers.get("content-type", "").startswith(_EVENTS):
                    await _send(send, found.status_code, _returned(found), await _whole(found))
                    return
                await send(_start(found.status_code, _returned(found)))
                has_begun = True
                async for part in found.aiter_bytes():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            except httpx.HTTPError:
                error = json.dumps({"error": {"message": "the models' process has ended or does not answer"}}).encode()
                if has_begun:
                    await send({"type": "http.response.body", "body": b"data: " + error + b"\n\n"})
                else:
                    await _send(send, 502, [(b"content-type", b"application/json")], error)


async def _whole(found: httpx.Response) -> bytes:
    body = bytearray()
    async for part in found.aiter_bytes():
        body += part
        if len(body) > MAX_ANSWER:
            raise httpx.DecodingError("the answer is too large")
    return bytes(body)


def _returned(found: httpx.Response) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), found.headers[name].encode("latin-1")) for name in _RETURNED if name in found.headers]


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [*headers, (b"cache-control", b"no-store")]}


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send(_start(status, [*headers, (b"content-length", str(len(body)).encode())]))
    await send({"type": "http.response.body", "body": body})


async def _until_gone(receive: Receive) -> None:
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
