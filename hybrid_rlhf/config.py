"""Errors that are the user's, and the one way a command line becomes frozen dataclasses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The user's input is wrong. The message is one line: what, where, what would fit. The doors exit with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """' (did you mean X?)' for the known name most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def check(condition: bool, message: str) -> None:
    """Raise UserError(message) unless `condition` holds; for value checks beside the value."""
    if not condition:
        raise UserError(message)
