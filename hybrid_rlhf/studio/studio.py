"""What every part of the studio shares: its folder, the news that the open tabs hear, and how a request is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

HOME = ".studio"  # of the outputs folder: uploads, jobs and marks
MAX_NEWS = 256  # that a tab may have waiting; one that reads more slowly is told to load again


class Refused(Exception):
    """A request that cannot be met: one line for the reader, and an HTTP status. option: the setting that is meant."""

    def __init__(self, status: int, text: str, option: str | None = None) -> None:
        super().__init__(text)
        self.status, self.option = status, option


class Route(NamedTuple):
    """One address. handle(query, body) -> what is sent as JSON, called in a thread of its own; with is_raw it is
    starlette's: an async function from a Request to a Response. query: of strings; body: of a POST's JSON object."""

    method: str
    path: str
    handle: Callable
    is_raw: bool = False


class News:
    """What has changed, for every open tab. `publish` may be called by any thread."""

    def __init__(self) -> None:
        self._tabs: set[asyncio.Queue] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def publish(self, name: str, data: dict) -> None:
        """Tell all tabs; an event of the page's `on(name, ...)`. Without a tab it is forgotten: pages load first."""
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # it ends at this moment
                self._loop.call_soon_threadsafe(self._hand_out, f"event: {name}\ndata: {json.dumps(data)}\n\n")

    def _hand_out(self, text: str) -> None:
        for tab in self._tabs:
            if tab.qsize() < MAX_NEWS:
                tab.put_nowait(text)
            elif tab.qsize() == MAX_NEWS:
                tab.put_nowait("event: reload\ndata: {}\n\n")

    def end(self) -> None:
        """All tabs' connections end: the studio ends, and waits for nobody who only listens."""
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(lambda: [tab.put_nowait(None) for tab in self._tabs])

    async def listen(self) -> AsyncIterator[str]:
        """Server-sent events as text, until the reader leaves; a comment every 15 seconds shows who has left."""
        self._loop = asyncio.get_running_loop()
        tab: asyncio.Queue = asyncio.Queue()
        self._tabs.add(tab)
        try:
            yield "retry: 1000\n\n"
            while True:
                try:
                    text = await asyncio.wait_for(tab.get(), 15)
                except TimeoutError:
                    text = ":\n\n"
                if text is None:
                    return
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

    def folder(self, name: object) -> Path:
        """The folder of a run's id, its path below `outputs`. Refused for anything else: nothing outside is read."""
        if not isinstance(name, str) or not name or "\0" in name:
            raise Refused(400, "no run is named")
        parts = name.split("/")
        if name.startswith("/") or any(part in ("", ".", "..") or part.startswith(".") for part in parts):
            raise Refused(404, f"there is no run {name[:100]!r}")
        path = self.outputs.joinpath(*parts)
        try:
            is_run = path.is_dir() and path.resolve() == path  # a link may lead anywhere
        except OSError:  # a name that is too long, a folder that may not be read
            is_run = False
        if not is_run:
            raise Refused(404, f"there is no run {name[:100]!r}")
        return path
