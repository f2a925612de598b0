"""The exit codes that the commands share."""

from __future__ import annotations

import sys
from collections.abc import Callable

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.text_safety import error_line

WRONG_INPUT, INTERRUPTED = 2, 130


def exit_code(act: Callable[[], int]) -> int:
    """What `act` returns; 2, with one line on stderr, where the input is wrong, and 130 at Ctrl-C."""
    try:
        return act()
    except UserError as error:
        print(error_line(error), file=sys.stderr)
        return WRONG_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
