"""Errors in the user's input."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from hybrid_rlhf.core.text_safety import error_line

T = TypeVar("T")


class UserError(Exception):
    """The user's input is wrong. The message is one line: what, where, what would fit. Entry points exit with 2.

    is_before_update: raised in a training step before it has changed any weight.
    """

    is_before_update = False

    def _render_traceback_(self) -> list[str]:
        """IPython's display of it, in a notebook too: the line alone."""
        return [error_line(self), *getattr(self, "__notes__", [])]


class NotFinite(UserError):
    """Losses or gradients have not been finite for so long that the run ends."""


CRITIC_CURE = ("lower roles.critic.learning_rate, or the scores (ppo.score_clip bounds a reward model's, "
               "reward.weights scales the others)")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """' (did you mean X?)' for the known name most like `name`, by difflib's ratio of at least `cutoff`, or nothing."""
    known = list(known)
    if name in known:  # messages are formatted before the check that may need them
        return ""
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]}?)" if close else ""


def shown(error: BaseException) -> str:
    """An error's message and its notes, a line each."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def check(condition: object, message: str) -> None:
    """Raise UserError(message) unless `condition` holds; for value checks beside the value."""
    if not condition:
        raise UserError(message)


def present(value: T | None, name: str) -> T:
    """`value`, which must be there by now. ValueError where it is None: a fault of the calling code, not the user's."""
    if value is None:
        raise ValueError(f"{name} is None, and is needed here")
    return value


# -- The exit codes that the commands share ----------------------------------------------------------------------------


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
