"""python -m hybrid_rlhf: the launcher, as the installed command hybrid-rlhf is."""

from __future__ import annotations

import sys
from pathlib import Path


def launch() -> int:
    """Python's -m looks for modules in the current folder first, the installed command does not: a user's copy.py or
    datasets.py there would be taken for the library's. A checkout's own folder stays."""
    is_ours = Path(sys.path[0]).resolve() == Path(__file__).resolve().parents[1]
    if not (is_ours or sys.argv[0] == "-c" or getattr(sys.flags, "safe_path", False)):  # -P has left it out already
        del sys.path[0]
    sys.argv[0] = "hybrid-rlhf"  # what the run's messages name
    from hybrid_rlhf.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(launch())
