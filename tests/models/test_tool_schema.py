"""What a model is shown of a function, and the one line for each function that no model could be shown."""

from __future__ import annotations

import functools
from typing import Literal

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.models.tool_schema import schema_of
from tests.factories.releases import transformers_before


def find(word: str, place: Literal["title", "text"] = "text", limit: int | None = None) -> list[str]:
    """Find pages.

    Args:
        word: what to look for
        place: where to look
        limit: how many at most,
            all of them without it

    Returns:
        The pages' names.
    """
    return [word, place, str(limit)]


class Shop:
    def buy(self, thing: str) -> None:
        """Buy a thing.

        Args:
            thing: its name
        """


def test_a_schema_has_the_types_and_descriptions_that_were_written():
    assert schema_of(find, "find") == {"type": "function", "function": {
        "name": "find", "description": "Find pages.",
        "parameters": {"type": "object", "required": ["word"], "properties": {
            "word": {"type": "string", "description": "what to look for"},
            "place": {"type": "string", "enum": ["title", "text"], "description": "where to look"},
            "limit": {"type": "integer", "nullable": True, "description": "how many at most, all of them without it"}}},
        "return": {"type": "array", "items": {"type": "string"}, "description": "The pages' names."}}}


def test_a_method_is_shown_without_its_self():
    assert list(schema_of(Shop().buy, "buy")["function"]["parameters"]["properties"]) == ["thing"]


class Odd:
    def __str__(self) -> str:
        raise RuntimeError("no words")


def no_docstring(a: int) -> int:
    return a


def no_hint(a):
    """Do. \n\nArgs:\n    a: it"""


def undescribed(a: int, b: int):
    """Do. \n\nArgs:\n    a: it"""


def many(*values: int):
    """Do. \n\nArgs:\n    values: them"""


def keywords(**values: int):
    """Do. \n\nArgs:\n    values: them"""


def by_place(a: int, /):
    """Do. \n\nArgs:\n    a: it"""


def unknown_type(a: Missing):  # noqa: F821 - the fault
    """Do. \n\nArgs:\n    a: it"""


def own_type(a: Odd):
    """Do. \n\nArgs:\n    a: it"""


def bad_choices(a: str):
    """Do. \n\nArgs:\n    a: it (choices: [one, two])"""


def parts(a: int):
    """Do. \n\nArgs:\n    a: it"""
    yield a


@pytest.mark.parametrize(("function", "says"), [
    (no_docstring, "has no docstring"), (no_hint, "parameter a has no type hint; .* a: str"),
    (undescribed, "does not describe the parameter b; .*'b: what it means'"), (many, r"takes \*values"),
    (keywords, r"takes \*\*values"), (by_place, "takes a, /"), (unknown_type, "'Missing' is not defined"),
    pytest.param(own_type, "cannot be shown to a model: .*Odd", marks=pytest.mark.skipif(
        transformers_before("5.23"), reason="a class of one's own is an object there")),
    (bad_choices, "cannot be shown to a model"),
    (parts, "yields its answer in parts"), (functools.partial(find, word="a"), "is a partial; a function is needed"),
    (3, "is a int; a function is needed"), (Shop, "is a type; a function is needed")])
def test_what_no_schema_can_show_is_one_line_that_names_the_function(function, says):
    with pytest.raises(UserError, match=f"^environment.tools: x.*{says}") as refused:
        schema_of(function, "environment.tools: x")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
