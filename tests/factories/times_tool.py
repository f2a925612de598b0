"""A tool of the tests' environments: a method, its source, and the schema that a template shows."""

from __future__ import annotations

import inspect
from textwrap import indent


def times(self, a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    self.calls += 1
    return a * b


TIMES = "\n" + indent(inspect.getsource(times), "    ")  # of a class whose objects count their calls
SCHEMA = {"type": "function", "function": {
    "name": "times", "description": "Multiplies two numbers.", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer", "description": "The first number."},
                                         "b": {"type": "integer", "description": "The second number."}},
        "required": ["a", "b"]}, "return": {"type": "integer"}}}
