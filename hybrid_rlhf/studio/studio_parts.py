"""The studio's parts: each is a module with routes(studio) -> list of `Route`, and what it does at the end."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_rlhf.studio import exports, job_requests, marks, new_run, talk, uploads
from hybrid_rlhf.studio.jobs import Jobs
from hybrid_rlhf.studio.look import Look
from hybrid_rlhf.studio.runs_part import open_runs
from hybrid_rlhf.studio.studio import Route, Studio


def open_parts(studio: Studio) -> tuple[list[Route], list[Callable[[], None]]]:
    """All addresses, and what is called when the studio ends."""
    routes: list[Route] = []
    closers: list[Callable[[], None]] = []
    found, close = open_runs(studio)
    routes += found
    closers.append(close)
    queue = Jobs(studio)
    queue.open()
    closers.append(queue.close)
    routes += [*job_requests.routes(studio, queue), *exports.routes(studio, queue), *uploads.routes(studio)]
    chat = talk.Talk(studio)
    closers.append(chat.end)
    routes += [*talk.routes(studio, chat), *marks.routes(studio)]
    look = Look()
    closers.append(look.close)
    routes += new_run.routes(studio, look)
    return routes, closers
