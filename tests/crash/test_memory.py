"""A run that is taken up again needs no more memory than it did before: its state comes tensor by tensor."""

from __future__ import annotations

import re

import pytest

from tests.crash.place import argv_of, prepare, run
from tests.factories.tiny import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


COUNTED = ("import atexit, resource as r, sys\n"
           "atexit.register(lambda: print('peak', r.getrusage(r.RUSAGE_SELF).ru_maxrss, file=sys.stderr))\n"
           "from hybrid_rlhf.cli import main; sys.exit(main())")


def peak(log: str) -> int:
    """KiB, as the system counted them for the whole process."""
    return int(re.findall(r"^peak (\d+)", log, re.MULTILINE)[-1])


@pytest.mark.parametrize("more", [[], ["--model.dtype", "bfloat16"]], ids=["float32", "bfloat16_masters"])
def test_the_peak_of_memory_after_resuming_is_no_higher_than_before(tmp_path, more):
    """34 million weights: weights, moments and gradients take 540 MB in float32, and a second copy of the state 400."""
    prepare(tmp_path)
    save_tiny(tmp_path / "base", hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    argv = argv_of(tmp_path, "sft", "run", 4, "--train.save_steps", "2", "--train.eval_steps", "0", *more)
    code = ("import sys; from hybrid_rlhf.run import loop; import os; step, n = loop._step, [0]\n"
            "def counted(*given):\n    n[0] += 1\n    if n[0] == 4: os._exit(9)\n    return step(*given)\n"
            "loop._step = counted; from hybrid_rlhf.cli import main; sys.exit(main())")
    straight = run([w.replace("/run", "/straight") for w in argv], COUNTED)
    assert straight.returncode == 0, straight.stderr[-2000:]
    assert run(argv, code).returncode == 9
    resumed = run(argv, COUNTED)
    assert resumed.returncode == 0 and "goes on after step 2" in resumed.stderr
    assert peak(resumed.stderr) <= 1.03 * peak(straight.stderr), (peak(resumed.stderr), peak(straight.stderr))
