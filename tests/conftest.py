"""Fixtures that several files share."""

from __future__ import annotations

import fcntl
import gc
import sys
from pathlib import Path

import hypothesis
import pytest

from hybrid_rlhf.core.startup import restore_gc  # which notes the usual thresholds

hypothesis.settings.register_profile("any load", deadline=None)  # a test's time is the machine's
hypothesis.settings.load_profile("any load")
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
gc.set_threshold(100_000, 1_000, 1_000)  # until everything has been imported, as in core/startup.py


def pytest_collection_finish() -> None:
    """Python's collector leaves alone the ten thousand tests and what they import, which stay."""
    restore_gc()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """The folder of the embedded task's SFT and reward runs (seed 0), a minute on one thread; made once for all
    processes of a test run, and only where a slow test asks for it."""
    import methods

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "learned"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return methods.fixtures(shared, 0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium; tests that ask for it are marked `needs_browser`."""
    from tests.factories.browser import chromium

    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch) -> None:
    """Runs draw no plots, which is half of a tiny run's time, but in tests that are marked `plots`."""
    if not request.node.get_closest_marker("plots"):
        monkeypatch.setattr("hybrid_rlhf.report.summary.draw", lambda _history, _folder: [])


@pytest.fixture
def card():
    """The simulated card, for the test."""
    from tests.simulated_card import simulated_card

    with simulated_card() as made:
        yield made


@pytest.fixture
def recordings(monkeypatch) -> list:
    """One entry for each decode step that is recorded on a card."""
    from hybrid_rlhf.engine.decode.cuda_graphs import CudaCapture

    found, capture = [], CudaCapture.__call__
    monkeypatch.setattr(CudaCapture, "__call__", lambda self, step: (found.append(step), capture(self, step))[1])
    return found
