"""What stands before the application: the key, where a request may come from, and how long a connection may dawdle."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from uvicorn import Config
from uvicorn import Server as UvicornServer
from uvicorn.protocols.http.h11_impl import H11Protocol

from hybrid_rlhf.core.loopback import is_loopback
from hybrid_rlhf.inference.server.protocol import ApiError

HEADER_SECONDS = 10.0  # from a connection's (or a next request's) first byte to the end of its headers
STALL_SECONDS = 30.0  # for which a reader may read nothing of what waits for it
MAX_CONNECTIONS = 512
STOP_SECONDS = 30  # for which a server that stops waits for open answers
_DRAIN_BYTES, _DRAIN_SECONDS = 16 * 2**20, 2.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_log = logging.getLogger(__name__)


def refusal(error: ApiError) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Headers and body of an error in OpenAI's shape; the connection ends with it, for the body may not have been
    read."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    body = json.dumps(error.body()).encode()
    headers.append((b"content-length", str(len(body)).encode()))
    return headers, body


async def refuse(send: Send, error: ApiError) -> None:
    headers, body = refusal(error)
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Guard:
    """ASGI middleware around everything.

    api_key: what /v1 and /score ask for, compared in constant time (None: nothing is asked). is_local: the server
    listens on this machine's own addresses only; without a key, requests whose Host or Origin is another are refused,
    so that a web page in the user's browser can neither send questions nor, by rebinding a name, read answers. Errors
    of the application become one line for the client and a traceback in the log.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], api_key: str | None,
                 is_local: bool) -> None:
        self._app, self._is_local = app, is_local
        self._digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        has_started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, receive, watched)
        except ApiError as error:
            await refuse(send, error)
        except Exception as error:  # a fault of ours must not end the connection without a word
            _log.exception("a request failed")
            if has_started:
                return  # uvicorn ends the connection where the answer is not complete
            await refuse(send, ApiError(500, f"an error of the server ({type(error).__name__}); its log says more"))

    def _check(self, scope: Scope) -> None:
        headers = dict(reversed(scope["headers"]))
        if self._digest is None:
            if self._is_local:
                _check_origin(headers)
            return
        path = scope["path"]
        if not path.startswith(("/v1", "/score")):
            return  # the page and /health hold nothing that is anyone's
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(_digest(key.strip()), self._digest)
        if kind.lower() != b"bearer" or not is_right:
            raise ApiError(401, "the API key is missing or wrong (Authorization: Bearer KEY); "
                                "send the key that the server was started with", code="invalid_api_key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of one length, so that the comparison tells nothing of it


def _check_origin(headers: dict[bytes, bytes]) -> None:
    for name, value in ((b"host", b"//" + headers.get(b"host", b"")), (b"origin", headers.get(b"origin", b""))):
        try:
            host = urlsplit(value.decode("latin-1")).hostname
        except ValueError:
            host = "?"
        if value.strip(b"/") and not is_loopback(host or "?"):
            raise ApiError(403, f"{name.decode()} is not this machine; start the server with an API key for others")


async def read_body(receive: Receive, headers: MutableMapping[str, str], max_bytes: int, seconds: float) -> bytes:
    """The request's body. ApiError 413 for one that is larger, 408 for one that does not come in time."""
    try:
        body = await asyncio.wait_for(_read(receive, headers, max_bytes), seconds)
    except TimeoutError:  # two classes before Python 3.11
        raise ApiError(408, f"the body did not arrive within {seconds:g} s; send it faster") from None
    if body is None:
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(_drain(receive), _DRAIN_SECONDS)
        raise ApiError(413, f"the body is larger than {max_bytes} bytes; "
                            "send less, or start the server with a larger --max_body_bytes", code="request_too_large")
    return body


async def _read(receive: Receive, headers: MutableMapping[str, str], max_bytes: int) -> bytes | None:
    """The body; None as soon as it is known to be too large."""
    declared, body = headers.get("content-length", "0"), bytearray()
    is_large, has_more = declared.isdigit() and int(declared[:20]) > max_bytes, True
    while has_more and not is_large:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client has left")
        body += message.get("body", b"")
        is_large, has_more = len(body) > max_bytes, message.get("more_body", False)
    return None if is_large else bytes(body)


async def _drain(receive: Receive) -> None:
    """Read on for a while: who is still sending would otherwise see a broken connection and not the answer."""
    left, has_more = _DRAIN_BYTES, True
    while left > 0 and has_more:
        message = await receive()
        left -= len(message.get("body", b""))
        has_more = message.get("more_body", False)


class PatientServer(UvicornServer):
    """uvicorn, where answers that are still open STOP_SECONDS after it was told to stop are ended by `stop`, which does
    not wait, and not cancelled. Told a second time it ends them at once, if one of the two was SIGINT."""

    def __init__(self, config: Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop, self._is_interrupted = stop, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn asks that SIGINT be the second; of two that come at once Python hands out the lower number first."""
        was_told = self.should_exit
        super().handle_exit(sig, frame)
        self._is_interrupted |= sig == signal.SIGINT
        self.force_exit |= was_told and self._is_interrupted

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.get_running_loop().call_later(STOP_SECONDS, self._stop)
        await super().shutdown(sockets)
        ending.cancel()
        if self.force_exit:  # which uvicorn takes for leave to skip what is below
            await self.lifespan.shutdown()


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP with an end to patience: for headers that do not come, and for readers that do not read. Of more
    connections than MAX_CONNECTIONS the oldest that has yet to ask for something is closed. What is no HTTP is refused
    in OpenAI's shape."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._header_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        is_open = [each for each in self.connections if not each.transport.is_closing()]
        if len(is_open) > MAX_CONNECTIONS:
            min((each for each in is_open if each._is_waited_for()), key=lambda each: each._since).transport.abort()
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and self._is_between():
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self._give_up)
        super().data_received(data)
        if not self._is_between():
            self._header_timer = _cancelled(self._header_timer)

    def _is_between(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _is_waited_for(self) -> bool:
        """Whether the client has not said all of its request."""
        return self._is_between() or self.cycle.more_body

    def send_400_response(self, msg: str) -> None:
        if self._is_between() or not self.cycle.response_started:
            headers, body = refusal(ApiError(400, "this is no HTTP/1.1 request that can be read; "
                                                  "send one with well-formed headers and body"))
            lines = [b"HTTP/1.1 400 Bad Request", *(name + b": " + value for name, value in headers), b"", body]
            self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self._stall_timer or self.loop.call_later(STALL_SECONDS, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stall_timer = _cancelled(self._stall_timer)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(STALL_SECONDS, self._give_up)  # a close waits until all is read

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._header_timer, self._stall_timer = _cancelled(self._header_timer), _cancelled(self._stall_timer)

    def _give_up(self) -> None:
        self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
