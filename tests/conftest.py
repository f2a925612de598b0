"""Fixtures that several files share."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from hybrid_rlhf.core.startup import restore_gc  # which notes the usual thresholds
from hybrid_rlhf.report import plots

hypothesis.settings.register_profile("any load", deadline=None)  # a test's time is the machine's
hypothesis.settings.load_profile("any load")
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
gc.set_threshold(100_000, 1_000, 1_000)  # until everything has been imported, as in core/startup.py


# What takes minutes comes first, or the last process of pytest works on it while the others have nothing left to do.
LONGEST = ("journeys/test_journeys.py", "journeys/test_examples.py", "distributed/test_two_processes.py",
           "benchmarks/test_bench_dry.py", "kernels/test_kernels_triton.py", "journeys/test_notebook_example.py",
           "benchmarks/test_games_learn.py", "simulated_card/test_stages_on_a_card.py", "roles/test_shared_base.py",
           "studio/test_studio_journey.py", "commands/test_qualify.py", "training/test_stages_learn.py",
           "rewards/test_reward_sources.py", "journeys/test_vision_example.py")


def pytest_collection_modifyitems(items: list) -> None:
    """Files of LONGEST first, the others as they were collected."""
    places = {str(Path(__file__).parent / name): place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(str(item.path), len(places)))


def pytest_collection_finish() -> None:
    """Python's collector leaves alone the ten thousand tests and what they import, which stay."""
    restore_gc()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def learned(tmp_path_factory) -> Path:
    """The folder of the demo's runs (seed 0), beside what it `said`: minutes on one thread; made once for all processes
    of a test run, and only where a slow test asks for it."""
    import methods

    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if base.name.startswith("popen-") else base) / "learned"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "said").exists():
            methods.own_cache(shared / "cache")  # of what is started from here by methods.py
            command = [sys.executable, "train.py", "--stage", "all", "--output_dir", str(shared / "demo")]
            run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent,
                                 env={"OMP_NUM_THREADS": "2", **os.environ})
            assert run.returncode == 0, run.stderr[-2000:]
            (shared / "said").write_text(run.stdout)
    return shared / "demo"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless Chromium; tests that ask for it are marked `needs_browser`."""
    from tests.factories.browser import chromium

    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def undrawn():
    """Runs draw no plots, half of a tiny run's time; those of a module's fixtures neither, hence the scope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_rlhf.report.summary.draw", lambda _history, _folder: [])
        yield


@pytest.fixture(autouse=True)
def drawn(request, undrawn, monkeypatch) -> None:
    """But in tests that are marked `plots`."""
    if request.node.get_closest_marker("plots"):
        monkeypatch.setattr("hybrid_rlhf.report.summary.draw", plots.draw)


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
