"""Two processes of which one dies or is stopped, or whose launcher dies: none trains on, and one line says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.crash.place import ROOT
from tests.factories.processes import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


def is_there(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(is_so, seconds: float = 60.0) -> bool:  # noqa: ANN001
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def begun(folder: Path, *more: str) -> tuple[subprocess.Popen, list[int]]:
    """The launcher, and the numbers of its two processes, in their third step or so."""
    started = launch(str(ROOT / "tests/crash/rank_loop.py"), str(folder), "0.2", *more)
    files = [folder / f"rank{i}" for i in (0, 1)]
    assert wait_for(lambda: all(f.exists() and f.read_text() for f in files))
    time.sleep(0.5)
    return started, [int(f.read_text()) for f in files]


def record(folder: Path) -> dict:
    return json.loads((folder / "run" / "run.json").read_text())


@pytest.mark.parametrize("more", [(), ("60", "20")], ids=["any_first", "other_process_first"])
def test_processes_whose_launcher_is_killed_save_and_end(tmp_path, more):
    launcher, numbers = begun(tmp_path, *more)
    launcher.kill()
    assert wait_for(lambda: not any(map(is_there, numbers)), 30)
    said = launcher.communicate(timeout=30)[1]
    assert said.count("the launcher has died") == 1 and "\ngo on: by the same launcher with 2 processes: " in said
    assert record(tmp_path)["status"] == "stopped" and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_when_one_process_is_killed_the_other_says_so_and_ends(tmp_path, which):
    launcher, numbers = begun(tmp_path)
    os.kill(numbers[which], signal.SIGKILL)
    assert wait_for(lambda: not any(map(is_there, numbers)), 10)
    said = [line for line in launcher.communicate(timeout=60)[1].splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"process {which} has died" in said[0]
    assert (record(tmp_path)["status"], record(tmp_path)["error"]) == ("failed", said[0])


def test_a_process_that_is_stopped_for_longer_than_the_others_wait_is_named(tmp_path):
    launcher, numbers = begun(tmp_path, "3")
    os.kill(numbers[1], signal.SIGSTOP)
    assert wait_for(lambda: not is_there(numbers[0]), 40)
    os.kill(numbers[1], signal.SIGCONT)
    said = [line for line in launcher.communicate(timeout=60)[1].splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "process 1 is stopped" in said[0] and not any(map(is_there, numbers))
    assert (record(tmp_path)["status"], record(tmp_path)["error"]) == ("failed", said[0])
