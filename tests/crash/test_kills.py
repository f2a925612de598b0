"""SIGKILL at any moment, also while a checkpoint is written: started again, a run ends as if it had never died.

A few moments here; thirty of them, in fresh processes, by `make crash`.
"""

from __future__ import annotations

import random

import pytest

from tests.crash.place import Nursery, argv_of, difference, prepare, rows_of, three_stages

STAGES = ("sft", "reward", "ppo")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("crash"))


@pytest.fixture(scope="module")
def nurseries(place):
    """Two processes with hash seeds of their own: what one began the other goes on with."""
    made = [Nursery(place), Nursery(place)]
    yield made
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def straight(place, nurseries):
    """The three stages without interruption, and what the process said of itself."""
    done = nurseries[0].run(three_stages(place, "straight", 6, 2))
    assert done["code"] == 0, done["log"][-2000:]
    return done


@pytest.mark.parametrize("seed", range(3))
def test_three_stages_killed_at_random_moments_end_as_the_ones_that_were_not(place, nurseries, straight, seed):
    """Twice in the midst of a save and twice by the clock, then to the end; --stage all goes on where it was. By the
    clock a machine that has become idle meanwhile may be done already, so those come last. The first is in the second
    or third save of the first stage, whatever the machine: so there is a checkpoint to go on from."""
    draw, out, argv = random.Random(seed), f"killed{seed}", three_stages(place, f"killed{seed}", 6, 2)
    codes, logs, a_save = [], "", straight["operations"] // 9
    moments = [{"at": draw.randrange(a_save + 2, 3 * a_save - 2)}, {"at": draw.randrange(3, 40)},
               *({"after": draw.uniform(0.1, 0.5) * straight["seconds"]} for _ in range(2))]
    for number, moment in enumerate(moments):
        found = nurseries[number % 2].run(argv, **moment)
        assert found["code"] in (-9, 0), found["log"][-2000:]
        codes, logs = [*codes, found["code"]], logs + found["log"]
    done = nurseries[1].run(argv)
    assert done["code"] == 0, done["log"][-2000:]
    assert codes.count(-9) >= 2 and "goes on after step" in logs + done["log"], "or nothing was put to the test"
    for stage in STAGES:
        assert difference(place / "straight" / stage, place / out / stage) is None, stage


def test_two_fresh_processes_with_one_seed_give_the_same_bits(place, nurseries, straight):
    assert nurseries[1].run(three_stages(place, "again", 6, 2))["code"] == 0
    for stage in STAGES:
        assert difference(place / "straight" / stage, place / "again" / stage) is None
    assert rows_of(place / "again" / "ppo", "metrics.jsonl")[-1]["step"] == 6


def test_a_dataset_that_is_deleted_while_a_run_goes_on_is_one_line_at_the_next_start(place, nurseries):
    """The rows of a run are its own once it has begun; a run that is taken up again needs them, and says so."""
    from shutil import copyfile

    copyfile(place / "sft.jsonl", place / "gone.jsonl")
    argv = [w.replace("sft.jsonl", "gone.jsonl") for w in argv_of(place, "sft", "gone", 8, "--train.save_steps", "2")]
    first = nurseries[0].run(argv, at=30)
    assert first["code"] == -9, first["log"][-2000:]
    (place / "gone.jsonl").unlink()
    found = nurseries[0].run(argv)
    assert found["code"] == 2 and "gone.jsonl" in found["log"] and "Traceback" not in found["log"]
    copyfile(place / "sft.jsonl", place / "gone.jsonl")
    assert nurseries[0].run(argv)["code"] == 0
