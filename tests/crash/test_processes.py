"""Two processes that die and are started again end as two that did not; where one dies, none trains on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.run import checkpoint
from tests.crash.place import ROOT, argv_of, difference, prepare, unlike
from tests.factories.processes import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
HALF = ["--model.dtype", "bfloat16"]
LAYOUTS = {"zero0": ["--engine.zero_stage", "0"], "zero1_bf16": ["--engine.zero_stage", "1", *HALF],
           "zero2_offload": ["--engine.zero_stage", "2", "--engine.offload", "[optimizer]"],
           "zero3_bf16": ["--engine.zero_stage", "3", *HALF]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("processes"))
    save = ["--train.save_steps", "2", "--train.per_device_train_batch_size", "3"]
    for stage in ("sft", "reward"):
        assert main(argv_of(folder, stage, stage, 2)) == 0
    clock = {"a": ["--train.save_minutes", "0"], "b": ["--train.save_minutes", "1e-9"]}  # b saves oftener than a
    runs = {name: [argv_of(folder, "sft", f"{name}_{which}", 5, *save, *clock[which], *more) for which in "ab"]
            for name, more in LAYOUTS.items()}
    others = ["--roles.reward.model_name_or_path", f"{folder}/reward", "--model.model_name_or_path", f"{folder}/sft"]
    others += ["--engine.zero_stage", "3"]
    runs["ppo"] = [argv_of(folder, "ppo", f"ppo_{which}", 5, *save, *others) for which in "ab"]
    steps = {name: [(straight, None), (broken, 4), (broken, None)] for name, (straight, broken) in runs.items()}
    (folder / "runs.json").write_text(json.dumps(steps))
    started = launch("tests/factories/rank_runs.py", f"{folder}/runs.json")
    _, log = started.communicate(timeout=500)
    assert started.returncode == 0, log[-3000:]
    assert json.loads((folder / "runs.json.out").read_text()) == {name: [0, "killed", 0] for name in runs}
    return folder


@pytest.mark.parametrize("name", [*LAYOUTS, "ppo"])
def test_two_processes_go_on_bit_for_bit(place, name):
    straight, broken = place / f"{name}_a", place / f"{name}_b"
    assert difference(straight, broken) is None
    seconds = [checkpoint.read(checkpoint.latest(each / "checkpoints"), of=1) for each in (straight, broken)]
    assert unlike(*(checkpoint.load_all(s["trainer"]) for s in seconds)) is None


def test_what_all_processes_hold_is_written_once(place):
    """At ZeRO 0 the second process has nothing of its own but its random generators; at ZeRO 3 half of the weights."""
    def sizes(name: str) -> list[int]:
        path = checkpoint.latest(place / f"{name}_a" / "checkpoints")
        return [(path / checkpoint.of_rank(checkpoint.TENSORS, r)).stat().st_size for r in (0, 1)]

    first, second = sizes("zero0")
    assert second < 0.2 * first
    first, second = sizes("zero3_bf16")
    assert 0.8 * first < second < 1.2 * first


# --- one of them dies, or their launcher: none trains on, and one line says why

def is_there(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(is_so, seconds: float = 240.0) -> bool:  # noqa: ANN001
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def begun(folder: Path) -> tuple[subprocess.Popen, list[int]]:
    """The launcher, and the numbers of its two processes, in their third step or so."""
    started = launch(str(ROOT / "tests/crash/rank_loop.py"), str(folder), "0.5")
    files = [folder / f"rank{i}" for i in (0, 1)]
    assert wait_for(lambda: all(f.exists() and f.read_text() for f in files))
    time.sleep(1.2)
    return started, [int(f.read_text()) for f in files]


def record(folder: Path) -> dict:
    return json.loads((folder / "run" / "run.json").read_text())


def test_processes_whose_launcher_is_killed_save_and_end(tmp_path):
    launcher, numbers = begun(tmp_path)
    launcher.kill()
    assert wait_for(lambda: not any(map(is_there, numbers)), 90)
    said = launcher.communicate(timeout=240)[1]
    assert said.count("the launcher has died") == 1 and "\ngo on: by the same launcher with 2 processes: " in said
    assert record(tmp_path)["status"] == "stopped" and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("which", [0, 1])
def test_when_one_process_is_killed_the_other_says_so_and_ends(tmp_path, which):
    launcher, numbers = begun(tmp_path)
    os.kill(numbers[which], signal.SIGKILL)
    assert wait_for(lambda: not any(map(is_there, numbers)), 90)  # alone it would train for 100
    said = [line for line in launcher.communicate(timeout=240)[1].splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"process {which} has died" in said[0]
    assert (record(tmp_path)["status"], record(tmp_path)["error"]) == ("failed", said[0])
