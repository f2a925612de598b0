"""Security headers of the pages: scripts and requests of this server only, no frames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.types import Receive, Scope, Send

PAGE_HEADERS = [
    (b"content-security-policy", b"default-src 'self'; img-src data:; object-src 'none'; base-uri 'none'; "
                                 b"form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-cache")]


def with_policy(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """`app` with these headers on every answer."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *PAGE_HEADERS]
            await send(message)

        await app(scope, receive, with_headers)

    return answer
