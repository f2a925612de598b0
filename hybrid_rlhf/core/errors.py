"""Errors in the user's input, and untrusted text made safe to show on a terminal."""

from __future__ import annotations

import difflib
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable
from typing import TypeVar

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


# -- Untrusted text ----------------------------------------------------------------------------------------------------


# Formatting characters that ordinary writing needs: joiners (emoji, Indic and Persian script), marks of direction that
# end with their character, the soft hyphen.
_MEANT = {0x00AD, 0x061C, 0x200C, 0x200D, 0x200E, 0x200F}
_ORDINARY = re.compile(r"[\n\t\x20-\x7e]*")


def escape_control(text: str) -> str:
    """`text` with every character that could steer a terminal or hide what it says made visible; newline and tab stay.

    A model can be trained or talked into writing escape sequences, which clear the screen, rename the window or retype
    commands, and so can data. C0 controls and DEL become their Unicode pictures (ESC is shown as \u241b). C1 controls,
    direction overrides, invisible and private characters and lone surrogates become codes such as <U+202E>.
    """
    return text if _ORDINARY.fullmatch(text) else "".join(map(_visible, text))


def error_line(error: BaseException) -> str:
    """A UserError as every command prints it: one line, safe to show."""
    return escape_control(" ".join(f"error: {error}".split()))


def shortened(text: str, most: int = 500) -> str:
    """The beginning and the end of a text longer than `most` characters: a pasted megabyte is not printed again."""
    return text if len(text) <= most else f"{text[: most - 105]} ... {text[-100:]}"


def _visible(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or 0x20 <= code < 0x7F:
        return char
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\u2421"
    if code not in _MEANT and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co"):
        return f"<U+{code:04X}>"
    return char
