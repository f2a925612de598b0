"""What some processes do together: command lines one after another, of which some die in the same step.

torchrun tests/factories/rank_runs.py FILE: a JSON object name -> a list of [argv, the step in which it dies or null];
FILE.out is name -> what became of each: the exit code, or "killed".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hybrid_rlhf.cli import main
from hybrid_rlhf.core import failure
from hybrid_rlhf.core.distributed import rank, shutdown
from hybrid_rlhf.report import summary
from hybrid_rlhf.run import loop


class Killed(BaseException):
    """Nothing in the library catches it."""


def run(argv: list[str], last: int | None) -> int | str:
    """The command line's exit code; it dies in step `last` (of this process), after the update."""
    step, count = loop._step, [0]

    def counted(*given):
        count[0] += 1
        found = step(*given)
        if count[0] == last:
            raise Killed
        return found

    loop._step = counted
    try:
        return main(argv)
    except Killed:
        return "killed"
    finally:
        loop._step = step


if __name__ == "__main__":
    failure.join()
    summary.draw = lambda _history, _folder: []  # as in conftest.py: half of a tiny run's time
    named = json.loads(Path(sys.argv[1]).read_text())
    outcome = {name: [run(*given) for given in runs] for name, runs in named.items()}
    if rank() == 0:
        Path(sys.argv[1] + ".out").write_text(json.dumps(outcome))
    shutdown()
    if failure._peers:
        failure._peers.leave()  # else a slower process takes this one for dead
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a run that died leaves threads behind, with which an ordinary end may abort
