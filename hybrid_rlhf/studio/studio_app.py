"""The studio's web application: routes of all parts, events, static page, and access control."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount
from starlette.routing import Route as Address
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.hub import is_loopback
from hybrid_rlhf.core.own_files import refusal
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.inference.server.page_policy import with_policy
from hybrid_rlhf.studio import example, exports, marks, new_jobs, preflight, reward_code, talk, uploads
from hybrid_rlhf.studio.jobs import Jobs
from hybrid_rlhf.studio.run_history import Histories
from hybrid_rlhf.studio.run_pages import open_runs
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.studio import Refused, Route, Studio, bounded_body

PAGE = Path(__file__).parent / "page"
MAX_THREADS = 64
ASKED_AGAIN = "/api/reward/"  # code from the page: the token is asked for beside the cookie
_log = logging.getLogger(__name__)


def open_parts(studio: Studio) -> tuple[list[Route], list[Callable[[], None]]]:
    """All routes, and functions to call when the studio ends."""
    histories, jobs, looks = Histories(), Jobs(studio), preflight.Look()
    runs = RunList(studio, histories)
    chat = talk.Talk(studio, runs)
    run_routes, stop_watching = open_runs(studio, runs, histories)
    jobs.open()
    routes = [*run_routes, *new_jobs.routes(studio, jobs), *exports.routes(studio, jobs), *uploads.routes(studio),
              *talk.routes(chat), *marks.routes(studio), *preflight.routes(studio, looks), *example.routes(studio),
              *reward_code.routes(studio)]
    return routes, [stop_watching, jobs.close, chat.end, looks.close]


def make_app(studio: Studio, routes: Iterable[Route], token: str, port: int,
             closers: Iterable[Callable[[], None]] = (), host: str = "127.0.0.1") -> Access:
    """The complete application. closers: called on shutdown, each in a thread. host: what it listens on."""

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        # a preview may take minutes, and must not block other requests on a machine with few cores
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(MAX_THREADS, "studio"))
        yield
        for close in closers:
            await asyncio.to_thread(close)

    async def events(_request: Request) -> Response:
        return StreamingResponse(studio.news.listen(), media_type="text/event-stream",
                                 headers={"cache-control": "no-store"})

    addresses = [Address(r.path, _guarded(r.handle) if r.is_raw else _json(r), methods=[r.method]) for r in routes]
    app = Starlette(routes=[*addresses, Address("/api/events", events),
                            Mount("/", with_policy(StaticFiles(directory=PAGE, html=True)))], lifespan=life)
    return Access(app, token, port, host)


def _json(route: Route) -> Callable:
    async def answer(request: Request) -> Response:
        query = dict(request.query_params)
        body = json.loads(await bounded_body(request)) if route.method == "POST" else {}
        text = await asyncio.to_thread(lambda: to_json(route.handle(query, body)))
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    return _guarded(answer)


def _guarded(handle: Callable) -> Callable:
    """Wrap `handle`: errors become one line (507 for a full or failing disk), bugs one line and a traceback in the
    log."""

    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except Refused as error:
            return JSONResponse({"error": str(error), "option": error.option}, error.status)
        except UserError as error:
            return JSONResponse({"error": str(error)}, 400)
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            if disk := refusal(error):
                return JSONResponse({"error": disk}, 507)
            _log.exception("a request of the studio's page failed")
            text = f"an error of the studio ({type(error).__name__}); its terminal says more"
            return JSONResponse({"error": text}, 500)

    return answer


# -- access -----------------------------------------------------------------------------------------------------------


class Access:
    """ASGI middleware for access control. A request needs:

    - a Host of this machine and port, against DNS rebinding: a loopback name; where it listens for others its own names
      and any number, since a page cannot make a number lead elsewhere;
    - the Origin (or Sec-Fetch-Site) of that Host, if present, against other pages in the browser;
    - the token, in an HttpOnly cookie that the first address (/?token=...) sets; for code also typed by the user.
    """

    def __init__(self, app: ASGIApp, token: str, port: int, host: str = "127.0.0.1") -> None:
        self._app, self._token, self._cookie = app, token, f"studio_{port}"
        names, numbers = {"127.0.0.1", "localhost", "[::1]", host.lower()}, ""
        if not is_loopback(host):
            names |= {name := socket.gethostname().lower(), f"{name}.local"}
            numbers = r"|[\d.]+|\[[\da-f:.]+\]"
        self._host = re.compile(f"({'|'.join(map(re.escape, names))}{numbers}):{port}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._refusal(HTTPConnection(scope), scope["method"]) if scope["type"] == "http" else None
        await (answer or self._app)(scope, receive, send)

    def _refusal(self, request: HTTPConnection, method: str) -> Response | None:
        """An error; a redirect that sets the cookie for a request with the token; None for one with the cookie."""
        headers, path = request.headers, request.scope["path"]
        is_first = path == "/" and method == "GET"
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "same-origin")
        if len(hosts := set(headers.getlist("host"))) != 1 or not self._host.fullmatch(hosts.pop().lower()):
            return _no(403, "this studio answers only at the address that it printed")
        is_elsewhere = origin is not None and origin.lower() != f"http://{headers['host'].lower()}"
        if is_elsewhere or (site not in ("same-origin", "none") and not is_first):
            return _no(403, "another page may not use the studio")
        if is_first and self._is_token(request.query_params.get("token", "")):
            answer = RedirectResponse("/", 303, {"referrer-policy": "no-referrer", "cache-control": "no-store"})
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        if self._is_token(request.cookies.get(self._cookie, "")):
            is_asked = path.startswith(ASKED_AGAIN) and not self._is_token(headers.get("x-studio-token", ""))
            return _no(403, "type the token of the address that the studio printed: this code will run on this machine"
                       ) if is_asked else None
        text = "open the studio by the address that it printed, with its token (after a restart it is a new one)"
        if path == "/":
            return PlainTextResponse(f"hybrid_rlhf studio: {text}\n", 401, {"cache-control": "no-store"})
        return _no(401, text)

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())


def _no(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status, {"cache-control": "no-store"})
