"""The part of the studio that shows runs: its addresses, and the thread that watches their files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

from hybrid_rlhf.studio import comparison, history_reader, run_details, run_files
from hybrid_rlhf.studio.history_reader import Histories
from hybrid_rlhf.studio.run_files import Unreadable
from hybrid_rlhf.studio.runs import RunList
from hybrid_rlhf.studio.sample_reader import Samples
from hybrid_rlhf.studio.studio import Refused, Route, Studio
from hybrid_rlhf.studio.watcher import Watcher

MAX_REPORT = 64 * 2**20
# A report is made of what models said: it may show pictures and styles of its own, and do nothing.
_REPORT_HEADERS = {"content-security-policy": "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'",
                   "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}


def open_runs(studio: Studio) -> tuple[list[Route], Callable[[], None]]:
    """The addresses, and what ends the watching that begins here."""
    histories, samples = Histories(), Samples()
    runs = RunList(studio, histories)
    watcher = Watcher(runs, studio.news)

    async def report(request: Request) -> Response:
        return await asyncio.to_thread(_report, studio, request.query_params.get("id"))

    watcher.start()
    return [Route("GET", "/api/runs", lambda _query, _body: runs.told()),
            Route("GET", "/api/run", lambda query, _body: run_details.details(runs, histories, query.get("id", ""))),
            Route("GET", "/api/history", lambda query, _body: history_reader.told(
                histories, studio.folder(query.get("id")), query)),
            Route("GET", "/api/samples", lambda query, _body: samples.told(studio.folder(query.get("id")), query)),
            Route("GET", "/api/compare", lambda query, _body: comparison.compare(runs, histories,
                                                                                  query.get("ids", ""))),
            Route("GET", "/api/report", report, is_raw=True)], watcher.stop


def _report(studio: Studio, run: object) -> Response:
    try:
        page = run_files.read_bytes(studio.folder(run) / run_files.PAGE, MAX_REPORT)
    except FileNotFoundError:
        raise Refused(404, "this run has no report yet") from None
    except Unreadable as error:
        raise Refused(404, str(error)) from None
    return Response(page, media_type="text/html", headers=_REPORT_HEADERS)
