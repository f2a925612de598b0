"""What one process and two processes leave, made once for all of pytest's own processes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.distributed.two_processes import RUNS, SLOW_RUNS, prepare


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, *of: object) -> Path:
    """The first process to come here makes the folder."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    folder = shared / name
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            prepare(folder, *of)
    return folder


def _found(place: Path) -> dict:
    assert (place / "out.json").exists(), (place / "log.txt").read_text()[-3000:]
    return json.loads((place / "out.json").read_text())


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """The folder of RUNS and of every check."""
    return _made_once(tmp_path_factory, "dist", RUNS)


@pytest.fixture(scope="session")
def found(place) -> dict:
    """check -> what each process measured."""
    return _found(place)


@pytest.fixture(scope="session")
def slow_place(tmp_path_factory) -> Path:
    """The folder of SLOW_RUNS."""
    return _made_once(tmp_path_factory, "dist_slow", SLOW_RUNS, "stages")


@pytest.fixture(scope="session")
def slow_found(slow_place) -> dict:
    return _found(slow_place)
