"""The studio's application: its addresses, its news, and its page."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount
from starlette.routing import Route as Address
from starlette.staticfiles import StaticFiles

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.strict_json import to_json
from hybrid_rlhf.inference.server.page_policy import with_policy
from hybrid_rlhf.studio.access import Access
from hybrid_rlhf.studio.studio import Refused, Route, Studio

PAGE = Path(__file__).parent / "page"
MAX_BODY = 2**20
MAX_THREADS = 64
_log = logging.getLogger(__name__)


def make_app(studio: Studio, routes: Iterable[Route], token: str, port: int,
             closers: Iterable[Callable[[], None]] = ()) -> Access:
    """The whole application. closers: called at its end, each in a thread."""

    @asynccontextmanager
    async def life(_app: Starlette) -> AsyncIterator[None]:
        # requests that wait (a preview may take minutes) must not keep others out, however few cores there are
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
    return Access(app, token, port)


def _json(route: Route) -> Callable:
    async def answer(request: Request) -> Response:
        body = await _body(request) if route.method == "POST" else {}
        return await asyncio.to_thread(_told, route, dict(request.query_params), body)

    return _guarded(answer)


def _told(route: Route, query: dict[str, str], body: dict) -> Response:
    """Strict JSON, whatever other people's files held: NaN becomes null, half a surrogate pair its escape."""
    return Response(to_json(route.handle(query, body)), media_type="application/json",
                    headers={"cache-control": "no-store"})


async def _body(request: Request) -> dict:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "the body must be JSON")
    text = b""
    async for part in request.stream():
        text += part
        if len(text) > MAX_BODY:
            raise Refused(413, "the request is too large")
    try:
        found = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON") from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is no JSON object")
    return found


def _guarded(handle: Callable) -> Callable:
    """`handle`, whose refusals become one line, and whose faults one line and a traceback in the log."""

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
            _log.exception("a request of the studio's page failed")
            text = f"an error of the studio ({type(error).__name__}); its terminal says more"
            return JSONResponse({"error": text}, 500)

    return answer
