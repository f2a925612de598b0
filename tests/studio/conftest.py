"""Fixtures that several files of the studio share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with tiny models, runs and rows."""
    from tests.factories.asked_new_run import tiny_place

    with tiny_place(tmp_path_factory.mktemp("place")) as found:
        yield found


@pytest.fixture(scope="module")
def client(place):
    """A client of the addresses behind the page of a new run, over `place`."""
    from tests.factories.asked_new_run import asking

    with asking(place) as found:
        yield found


@pytest.fixture
def stub():
    """The made-up answers that the page of a new run gets, and what it has asked."""
    from tests.factories.new_run_stub import Stub, run_row

    return Stub(runs=[run_row("demo/sft", "sft"), run_row("demo/reward", "reward"), run_row("taken", "dpo")])


@pytest.fixture
def page(browser, stub, tmp_path, monkeypatch):
    """The page of a new run over `stub`."""
    from tests.factories.new_run_stub import new_run_page

    with new_run_page(browser, stub, tmp_path / "outputs", monkeypatch) as found:
        yield found


@pytest.fixture
def outputs(tmp_path):
    """The folder of a studio's runs, empty."""
    (tmp_path / "outputs").mkdir()
    return tmp_path / "outputs"


@pytest.fixture
def queue():
    """What stands in for the studio's queue of jobs."""
    from tests.factories.studio_pages import MadeQueue

    return MadeQueue()


@pytest.fixture
def opened(browser, outputs, queue):
    """A studio over `outputs` and `queue`, its page of runs open in the browser."""
    from tests.factories.studio_pages import open_pages

    with open_pages(browser, outputs, queue) as found:
        yield found
