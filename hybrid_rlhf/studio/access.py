"""Who may come in: this machine's browser, from the studio's own page, with the token that was printed."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable, Callable], Awaitable[None]]


class Access:
    """ASGI middleware around everything. A request needs

    - a Host that is this machine and this port: a name that was rebound to 127.0.0.1 is another one;
    - where it has an Origin (or Sec-Fetch-Site), the studio's own: other pages in the browser cannot act;
    - the token, in a cookie that the page's first address (/?token=...) sets, and that no script can read.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token, f"studio_{port}"
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Callable, send: Callable) -> None:
        if scope["type"] == "http":
            answer = self._refusal(scope) or self._entry(scope)
            if answer is not None:
                await answer(scope, receive, send)
                return
        elif scope["type"] != "lifespan":
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if [name for name, _ in scope["headers"]].count(b"host") != 1 or headers["host"].lower() not in self._hosts:
            return _no(403, "this studio answers at 127.0.0.1 only")
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self._hosts}:
            return _no(403, "another page may not use the studio")
        if site not in ("same-origin", "none") and not (scope["method"] == "GET" and scope["path"] == "/"):
            return _no(403, "another page may not use the studio")
        return None

    def _entry(self, scope: Scope) -> Response | None:
        """None for who has the token; the way in for who brings it."""
        headers = dict(scope["headers"])
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token")
        if scope["path"] == "/" and scope["method"] == "GET" and given and self._is_token(given[0]):
            answer = RedirectResponse("/", 303, {"referrer-policy": "no-referrer", "cache-control": "no-store"})
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        cookies = headers.get(b"cookie", b"").decode("latin-1").split(";")  # other programs on 127.0.0.1 set odd ones
        if any(self._is_token(value.strip()) for name, _, value in (each.partition("=") for each in cookies)
               if name.strip() == self._cookie):
            return None
        text = "open the studio by the address that it printed, with its token (after a restart it is a new one)"
        if scope["path"] == "/":
            return PlainTextResponse(f"hybrid_rlhf studio: {text}\n", 401, {"cache-control": "no-store"})
        return _no(401, text)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())


def _no(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status, {"cache-control": "no-store"})
