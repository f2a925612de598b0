"""python inference/server --model DIR, from a checkout that need not be installed; hybrid-rlhf serve is the same."""

import sys
from pathlib import Path

if not __package__:  # run by its path: Python put this folder on the path, but the library lies two above
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from hybrid_rlhf.inference.server.serve import main

if __name__ == "__main__":
    sys.exit(main())
