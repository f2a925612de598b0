"""A made-up queue for the pages: its jobs are what a test says, and what the page asks for is written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_rlhf.studio.studio import Refused, Route
from tests.factories import studio_server
from tests.factories.studio_server import Running, running_studio


@dataclass
class MadeQueue:
    """asked: (path, body) of each request that would change something. refusal: what such a request is answered with.
    output: of every job."""

    jobs: list[dict] = field(default_factory=list)
    asked: list[tuple[str, dict]] = field(default_factory=list)
    refusal: str | None = None
    output: str = ""

    def add(self, id: str, state: str, **facts: object) -> dict:  # noqa: A002
        """A job in the state, newest first as the studio lists them."""
        job = {"id": id, "kind": "train", "title": f"job {id}", "stage": "sft", "run": None, "state": state,
               "created": "2026-11-23T14:00:00+00:00", "started": None, "finished": None, "rc": None, "error": None,
               "place": None} | facts
        self.jobs.insert(0, job)
        return job

    def routes(self) -> list[Route]:
        changing = ("/api/jobs", "/api/job/stop", "/api/run/stop", "/api/run/resume")
        return [Route("GET", "/api/jobs", lambda _query, _body: {"jobs": self.jobs}),
                Route("GET", "/api/job", self._told),
                *(Route("POST", path, lambda _query, body, path=path: self._change(path, body)) for path in changing)]

    def _told(self, query: dict, _body: dict) -> dict:
        after = int(query.get("after", 0))
        job = next(job for job in self.jobs if job["id"] == query["id"])
        return {"job": job, "output": self.output[after:], "next": len(self.output)}

    def _change(self, path: str, body: dict) -> dict:
        self.asked.append((path, body))
        if self.refusal:
            raise Refused(409, self.refusal)
        return {"id": "1", "title": "an evaluation"}


@contextmanager
def studio_with_queue(outputs: Path, queue: MadeQueue) -> Iterator[Running]:
    """A running studio whose queue is `queue`; all else is the real one."""
    real = studio_server.open_parts

    def parts(studio):  # noqa: ANN001, ANN202
        routes, closers = real(studio)
        made = queue.routes()
        paths = {(route.method, route.path) for route in made}
        return made + [route for route in routes if (route.method, route.path) not in paths], closers

    studio_server.open_parts = parts
    try:
        with running_studio(outputs) as found:
            yield found
    finally:
        studio_server.open_parts = real
