"""What two processes do together for test_processes.py: runs that die in the same step, and go on.

torchrun tests/crash/rank_resume.py FILE: a JSON object name -> [argv of a straight run, argv of one that dies].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hybrid_rlhf.cli import main
from hybrid_rlhf.core import failure
from hybrid_rlhf.core.distributed import rank, shutdown
from hybrid_rlhf.run import loop


class Killed(BaseException):
    """Nothing in the library catches it."""


def dying(argv: list[str], last: int) -> None:
    """Run the command line, and die in step `last` after its update."""
    step, count = loop._step, [0]

    def counted(*given):
        count[0] += 1
        found = step(*given)
        if count[0] == last:
            raise Killed
        return found

    loop._step = counted
    try:
        main(argv)
    except Killed:
        pass
    finally:
        loop._step = step


if __name__ == "__main__":
    failure.join()
    outcome = {}
    for name, (straight, broken) in json.loads(Path(sys.argv[1]).read_text()).items():
        assert main(straight) == 0
        dying(broken, 4)
        outcome[name] = main(broken)
    if rank() == 0:
        Path(sys.argv[1] + ".out").write_text(json.dumps(outcome))
    shutdown()
