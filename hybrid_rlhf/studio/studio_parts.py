"""The studio's parts: each is a module with routes(studio) -> list of `Route`, and what it does at the end."""

from __future__ import annotations

from collections.abc import Callable

from hybrid_rlhf.studio import marks, talk
from hybrid_rlhf.studio.studio import Route, Studio


def open_parts(studio: Studio) -> tuple[list[Route], list[Callable[[], None]]]:
    """All addresses, and what is called when the studio ends."""
    routes: list[Route] = []
    closers: list[Callable[[], None]] = []
    chat = talk.Talk(studio)
    closers.append(chat.end)
    routes += [*talk.routes(studio, chat), *marks.routes(studio)]
    return routes, closers
