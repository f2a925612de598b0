"""Two processes that die and are started again end as two that did not, at every ZeRO stage."""

from __future__ import annotations

import json

import pytest

from hybrid_rlhf.cli import main
from hybrid_rlhf.run import checkpoint
from tests.crash.place import argv_of, difference, prepare, unlike
from tests.factories.processes import launch

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]
HALF = ["--model.dtype", "bfloat16"]
LAYOUTS = {"zero0": ["--engine.zero_stage", "0"], "zero1_bf16": ["--engine.zero_stage", "1", *HALF],
           "zero2": ["--engine.zero_stage", "2"],
           "zero2_offload": ["--engine.zero_stage", "2", "--engine.offload", "[optimizer]"],
           "zero3": ["--engine.zero_stage", "3"], "zero3_bf16": ["--engine.zero_stage", "3", *HALF]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("processes"))
    save = ["--train.save_steps", "2", "--train.per_device_train_batch_size", "3"]
    for stage in ("sft", "reward"):
        assert main(argv_of(folder, stage, stage, 2)) == 0
    clock = {"a": ["--train.save_minutes", "0"], "b": ["--train.save_minutes", "1e-9"]}  # b saves oftener than a
    runs = {name: [argv_of(folder, "sft", f"{name}_{which}", 6, *save, *clock[which], *more) for which in "ab"]
            for name, more in LAYOUTS.items()}
    others = ["--roles.reward.model_name_or_path", f"{folder}/reward", "--model.model_name_or_path", f"{folder}/sft"]
    others += ["--engine.zero_stage", "3"]
    runs["ppo"] = [argv_of(folder, "ppo", f"ppo_{which}", 6, *save, *others) for which in "ab"]
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
    first, second = sizes("zero3")
    assert 0.8 * first < second < 1.2 * first


def test_one_process_with_the_rows_of_two_is_told_what_to_give(place, capsys):
    """The run is finished; made unfinished, it is found to be of two, with 3 rows each."""
    record = place / "zero2_b" / "run.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"status": "stopped"}))
    argv = argv_of(place, "sft", "zero2_b", 6, "--train.save_steps", "2", "--train.per_device_train_batch_size", "3",
                   *LAYOUTS["zero2"])
    assert main(argv) == 2
    assert "was made by 2 processes and this run has 1: a step took 6 rows from all processes and would take 3; give " \
           "--train.per_device_train_batch_size 6" in capsys.readouterr().err
