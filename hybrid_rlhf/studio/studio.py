"""Shared parts of the studio: its folder and files, server-sent events, routes and errors."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from hybrid_rlhf.core.errors import error_line

HOME = ".studio"  # in the outputs folder, for uploads, jobs and marks
MAX_BODY = 20 * 2**20  # bytes of a request, with the pictures of a conversation; but for uploads


class Refused(Exception):
    """An error response: a one-line message and an HTTP status. option: the setting with the error."""

    def __init__(self, status: int, text: str, option: str | None = None) -> None:
        super().__init__(text)
        self.status, self.option = status, option


def line_of(error: BaseException) -> str:
    """The message of an error as one line, safe to show."""
    return error_line(error).removeprefix("error: ")


class Route(NamedTuple):
    """One route. handle(query, body) returns JSON data and runs in a thread; with is_raw it is an async function from
    starlette's Request to a Response. query: strings; body: the JSON object of a POST."""

    method: str
    path: str
    handle: Callable
    is_raw: bool = False


async def bounded_body(request: Request) -> bytes:
    """The body of a request. Raises Refused if it is larger than MAX_BODY."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise Refused(413, "the request is too large; shorten it, or start a new conversation")
    return body


class News:
    """Server-sent events for every open tab. Any thread may call `publish`."""

    def __init__(self) -> None:
        self._tabs: set[asyncio.Queue] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def publish(self, name: str, data: dict) -> None:
        """Send an event to all tabs, received by the page's `on(name, ...)`."""
        self._send(f"event: {name}\ndata: {json.dumps(data)}\n\n")

    def end(self) -> None:
        """Close the event streams of all tabs, so that the studio can end."""
        self._send(None)

    def _send(self, text: str | None) -> None:
        def hand_out() -> None:
            for tab in self._tabs:
                tab.put_nowait(text)

        with suppress(RuntimeError):  # the loop has ended
            if self._loop is not None:
                self._loop.call_soon_threadsafe(hand_out)

    async def listen(self) -> AsyncIterator[str]:
        """Yield events as text until the client disconnects or the studio ends."""
        self._loop = asyncio.get_running_loop()
        tab: asyncio.Queue = asyncio.Queue()
        self._tabs.add(tab)
        try:
            yield "retry: 1000\n\n"
            while (text := await tab.get()) is not None:
                yield text
        finally:
            self._tabs.discard(tab)


@dataclass(frozen=True)
class Studio:
    """outputs: the folder of all runs, absolute and resolved."""

    outputs: Path
    news: News = field(default_factory=News)

    @property
    def home(self) -> Path:
        return self.outputs / HOME

    def folder(self, name: str) -> Path:
        """The folder of a run's id, which is its path below `outputs`. Raises Refused for anything else."""
        path, parts = self.outputs / name, name.split("/")
        is_hidden = any(part.startswith(".") or not part for part in parts)
        if is_hidden or not os.path.isdir(path) or os.path.realpath(path) != str(path):
            raise Refused(404, f"there is no run {name[:100]!r}")
        return path


# -- files -----------------------------------------------------------------------------------------------------------


def own_folder(studio: Studio, name: str) -> Path:
    """The folder .studio/NAME, created if missing, private to this user."""
    folder = studio.home / name
    studio.home.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def read_json(path: Path) -> dict | None:
    """The JSON object in a file; None for anything else."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
