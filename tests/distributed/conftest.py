"""What one process and two processes leave, made once for all of pytest's own processes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from tests.distributed.two_processes import prepare


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """The folder of all runs and checks; the first of pytest's processes to come here makes it."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if os.environ.get("PYTEST_XDIST_WORKER") else shared
    folder = shared / "dist"
    with open(shared / "dist.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            prepare(folder)
    return folder


@pytest.fixture(scope="session")
def found(place) -> dict:
    """check -> what each process measured."""
    assert (place / "out.json").exists(), (place / "log.txt").read_text()[-3000:]
    return json.loads((place / "out.json").read_text())
