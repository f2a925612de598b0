"""The whole studio in a thread of this process: all parts, a free port, and its closers at the end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from hybrid_rlhf.studio.studio import Studio
from hybrid_rlhf.studio.studio_app import make_app, open_parts

TOKEN = "t" * 32


@dataclass(frozen=True)
class Running:
    """url: with the token, as a browser opens it first. base: without. client: has been let in."""

    base: str
    port: int
    studio: Studio
    client: httpx.Client
    token: str = TOKEN

    @property
    def url(self) -> str:
        return f"{self.base}/?token={self.token}"


@contextmanager
def running_studio(outputs: Path, seconds: float = 120) -> Iterator[Running]:
    """A studio over the folder `outputs` (made where it is missing), until the block ends. seconds: to start or end."""
    outputs.mkdir(parents=True, exist_ok=True)
    studio = Studio(outputs.resolve())
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    routes, closers = open_parts(studio)
    server = uvicorn.Server(uvicorn.Config(
        make_app(studio, routes, TOKEN, port, closers), ws="none", lifespan="on", log_level="error", access_log=False,
        server_header=False, timeout_keep_alive=5, timeout_graceful_shutdown=1))
    taken.listen(128)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
    thread.start()
    try:
        end = time.monotonic() + seconds
        while not server.started:
            assert thread.is_alive() and time.monotonic() < end, "the studio did not start"
            time.sleep(0.01)
        base = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base, timeout=30) as client:
            assert client.get("/", params={"token": TOKEN}).status_code == 303
            yield Running(base, port, studio, client)
    finally:
        server.should_exit = True
        thread.join(seconds)
        taken.close()
        assert not thread.is_alive(), "the studio did not end"
