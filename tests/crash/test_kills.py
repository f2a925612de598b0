"""SIGKILL at any moment, also while a checkpoint is written: started again, a run ends as if it had never died.

A few moments here; thirty of them, in fresh processes, by `make crash`.
"""

from __future__ import annotations

import random
import re

import pytest

from tests.crash.place import Nursery, argv_of, difference, prepare, run, three_stages
from tests.factories.tiny import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STAGES = ("sft", "reward", "ppo")


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


@pytest.mark.parametrize("seed", range(2))
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


# --- memory: the state of a run that is taken up again comes tensor by tensor

COUNTED = ("import atexit, resource as r, sys\n"
           "atexit.register(lambda: print('peak', r.getrusage(r.RUSAGE_SELF).ru_maxrss, file=sys.stderr))\n"
           "from hybrid_rlhf.cli import main; sys.exit(main())")


def peak(log: str) -> int:
    """KiB, as the system counted them for the whole process."""
    return int(re.findall(r"^peak (\d+)", log, re.MULTILINE)[-1])


def test_the_peak_of_memory_after_resuming_is_no_higher_than_before(tmp_path):
    """34 million weights: with masters and moments a second copy of the state would take 480 MB."""
    prepare(tmp_path)
    save_tiny(tmp_path / "base", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    argv = argv_of(tmp_path, "sft", "run", 4, "--train.save_steps", "2", "--train.eval_steps", "0", "--model.dtype",
                   "bfloat16")
    code = ("import sys; from hybrid_rlhf.run import loop; import os; step, n = loop._step, [0]\n"
            "def counted(*given):\n    n[0] += 1\n    if n[0] == 4: os._exit(9)\n    return step(*given)\n"
            "loop._step = counted; from hybrid_rlhf.cli import main; sys.exit(main())")
    straight = run([w.replace("/run", "/straight") for w in argv], COUNTED)
    assert straight.returncode == 0, straight.stderr[-2000:]
    assert run(argv, code).returncode == 9
    resumed = run(argv, COUNTED)
    assert resumed.returncode == 0 and "goes on after step 2" in resumed.stderr
    assert peak(resumed.stderr) <= 1.03 * peak(straight.stderr), (peak(resumed.stderr), peak(straight.stderr))
