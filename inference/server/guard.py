"""Middleware before the application: checks API key, Host and Origin, and the size of the body."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from hybrid_rlhf.core.hub import is_loopback
from hybrid_rlhf.inference.server.protocol import ApiError

MAX_CONNECTIONS = 512  # uvicorn answers 503 beyond them
DRAIN_BYTES = 2**24  # read of an oversized body: else its sender sees a broken connection, and not the answer


class Guard:
    """ASGI middleware around the application.

    api_key: required for /v1 and /score, compared in constant time (None: not required). is_local: the server listens
    on loopback addresses only; without a key, requests with another Host or Origin are refused, so that a web page in
    the user's browser can neither send requests nor, by DNS rebinding, read answers. Bodies must be JSON of at most
    max_body_bytes; they are read here, before the application.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api_key: str | None, is_local: bool,
                 max_body_bytes: int) -> None:
        self._app, self._is_local, self._max_bytes, self._key = app, is_local, max_body_bytes, api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self._check_access(scope["path"], headers)
                if scope["method"] == "POST":
                    receive = _again(await self._body(headers, receive), receive)
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_access(self, path: str, headers: Headers) -> None:
        if self._key is None:
            for name in ("host", "origin") if self._is_local else ():
                if (value := headers.get(name, "")) and not _is_here(value if name == "origin" else f"//{value}"):
                    raise ApiError(403, f"{name} is not this machine; start the server with an API key for others")
        elif path.startswith(("/v1", "/score")):  # the page and /health hold no private data
            kind, _, key = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(key.strip(" \t").encode("latin-1"), self._key.encode())
            if kind.lower() != "bearer" or not is_right:
                raise ApiError(401, "the API key is missing or wrong (Authorization: Bearer KEY); "
                                    "send the key that the server was started with", code="invalid_api_key")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # a foreign web page can send forms and plain text without CORS
            raise ApiError(415, "the body must be JSON (Content-Type: application/json)")
        body, size, has_more = bytearray(), 0, True
        while has_more and size <= self._max_bytes + DRAIN_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the client has left")
            size, has_more = size + len(message.get("body", b"")), message.get("more_body", False)
            if size <= self._max_bytes:
                body += message.get("body", b"")
        if size > self._max_bytes:
            raise ApiError(413, f"the body is larger than {self._max_bytes} bytes; "
                                "send less, or start the server with a larger --max_body_bytes",
                           code="request_too_large")
        return bytes(body)


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns a body already read."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def first_the_body() -> Message:
        return messages.pop() if messages else await receive()

    return first_the_body


def _is_here(address: str) -> bool:
    """Whether the address of a Host or an Origin is a loopback address."""
    try:
        return is_loopback(urlsplit(address).hostname or "?")
    except ValueError:
        return False


def error_response(error: ApiError) -> JSONResponse:
    """An error in OpenAI's shape; the connection is closed, since the body may not have been read."""
    headers = {"connection": "close"}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)
