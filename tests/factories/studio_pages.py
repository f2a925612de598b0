"""The studio's pages in a browser, over a made-up queue that writes down what is asked of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hybrid_rlhf.studio.studio import Refused, Route
from tests.factories import studio_server
from tests.factories.browser import find, until
from tests.factories.studio_server import Running, running_studio


@dataclass
class MadeQueue:
    """jobs: what it has, newest first. asked: (path, body) of each request that would change something. refusal: what
    such a request is answered with. output: of every job."""

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


@dataclass(frozen=True)
class OpenPages:
    """Pages of a running studio in a browser."""

    browser: object
    studio: Running

    def __call__(self, address: str):  # noqa: ANN204 - a selenium driver
        """The browser, at "#/runs" or another page that has a heading by then."""
        self.browser.get("about:blank")
        self.browser.get(f"{self.studio.base}/{address}")
        until(self.browser, lambda: find(self.browser, "h1").text)
        return self.browser

    def publish(self, name: str, data: dict) -> None:
        self.studio.studio.news.publish(name, data)


@contextmanager
def open_pages(browser, outputs: Path, queue: MadeQueue) -> Iterator[OpenPages]:  # noqa: ANN001
    """Pages over the runs in `outputs`."""
    with studio_with_queue(outputs, queue) as studio:
        browser.get(studio.url)
        yield OpenPages(browser, studio)
        browser.get("about:blank")


def curve(page, metric: str, selector: str = ".curve"):  # noqa: ANN001, ANN201
    """What draws a metric: its line, or what else of it is named."""
    return find(page, f"[data-metric='{metric}'] .plot {selector}")


def is_drawn(page, metric: str) -> bool:  # noqa: ANN001
    chart = find(page, f"[data-metric='{metric}']")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", chart)  # off the screen it is not loaded
    return bool(curve(page, metric).get_attribute("d"))


def press(page, *keys: str) -> None:  # noqa: ANN001
    """Keys, wherever the focus is."""
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(page).send_keys(*keys).perform()
