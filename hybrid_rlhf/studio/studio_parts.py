"""The studio's parts: each is a module with routes(studio) -> list of `Route`, and what it does at the end."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_rlhf.studio import new_run
from hybrid_rlhf.studio.look import Look
from hybrid_rlhf.studio.studio import Route, Studio


def open_parts(studio: Studio) -> tuple[list[Route], list[Callable[[], None]]]:
    """All addresses, and what is called when the studio ends."""
    routes: list[Route] = []
    closers: list[Callable[[], None]] = []
    look = Look()
    routes, closers = [*routes, *new_run.routes(studio, look)], [*closers, look.close]
    return routes, closers
