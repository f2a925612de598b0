"""A command of ours that ends with the studio that started it, even where that is killed.

    python -m hybrid_rlhf.studio.tied_process serve --model DIR

The studio holds the other end of standard input, which the system closes for it, however it ends. (Linux's
PR_SET_PDEATHSIG would go by the thread that started the process, and other systems have nothing like it.)
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress

from hybrid_rlhf.__main__ import launch

GRACE_SECONDS = 5.0  # to end well


def _end_with_the_studio() -> None:
    """Wait for the end of standard input; then this process ends, and what it has started in its session with it."""
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    if os.getpid() == os.getpgrp():  # a session of its own, as the studio gives it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main() -> int:
    threading.Thread(target=_end_with_the_studio, daemon=True).start()
    return launch()


if __name__ == "__main__":
    sys.exit(main())
