"""What two processes run for test_processes.py: the loop on a trainer that only counts and waits, by the entry point.

torchrun tests/crash/rank_loop.py FOLDER SECONDS: 200 steps of so many seconds.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

from hybrid_rlhf import cli
from hybrid_rlhf.core.distributed import rank
from hybrid_rlhf.training import announce
from tests.factories.counting import runner

if __name__ == "__main__":
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])

    def run(config: object, command: str) -> None:
        def step() -> None:
            if not (mark := folder / f"rank{rank()}").exists():
                mark.write_text(str(os.getpid()))
            time.sleep(seconds)

        runner(folder)("run", dict.fromkeys(range(1, 201), step), steps=200, save_steps=0, save_minutes=0.0,
                       eval_steps=0)

    announce.after = lambda *_: None
    cli._train = lambda _argv: cli._run(SimpleNamespace(run=run), None, "")
    sys.exit(cli.main([]))
