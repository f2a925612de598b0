"""What is built in, opened as the settings name it: by its tools' schemas and through a whole episode."""

from __future__ import annotations

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.open import open_environments

URL = {"url": "http://localhost:1"}


def test_the_tools_are_shown_with_one_text_each_and_called():
    kind = open_environments(None, ["builtin:calculator", "builtin:python_expression"], {}).kinds[0]
    shapes = {s["function"]["name"]: s["function"]["parameters"] for s in kind.schemas}
    assert {name: (list(s["properties"]), s["required"]) for name, s in shapes.items()} == {
        "calculator": (["expression"], ["expression"]), "python_expression": (["code"], ["code"])}
    assert all(p["type"] == "string" and p["description"] for s in shapes.values() for p in s["properties"].values())
    tools = kind.new()
    assert tools.call("calculator", {"expression": "6*7"}) == "42"
    assert tools.call("python_expression", {"code": "[1, 2][::-1]"}) == "[2, 1]"


@pytest.mark.parametrize("name, options, tools", [
    ("guess_number", {}, []), ("guess_number_tool", {"high": 9}, ["guess"]), ("word_game", {"words": ["cat",
    "dog"]}, []),
    ("openenv", URL, []), ("reasoning_gym", {"task": "chain_sum"}, []),
])
def test_an_environment_has_no_tools_but_those_it_means(name, options, tools):
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    [kind] = open_environments(f"builtin:{name}", [], options).kinds
    assert kind.tool_names == tools and kind.has_step is (not tools) and kind.has_reward is bool(tools)


def test_a_whole_game_through_the_contract():
    game = open_environments("builtin:guess_number", [], {"high": 9, "cost": 0.5}).kinds[0].new()
    assert "from 1 to 9" in game.reset({"prompt": "Play.", "secret": 4, "environment": None})
    said = [{"role": "assistant", "content": "5"}]
    assert game.step(said) == ([{"role": "user", "content": "lower"}], False, -0.5)
    assert game.step([{"role": "assistant", "content": "4"}]) == ([{"role": "user", "content": "right"}], True, 1.0)
    tool = open_environments("builtin:guess_number_tool", [], {}).kinds[0].new()
    tool.reset({"secret": 4})
    assert tool.call("guess", {"number": 5}) == "lower" and tool.reward() == -0.05


@pytest.mark.parametrize("name, options, message", [
    ("guess_numbers", {}, "did you mean guess_number"), ("word_game", {"max_guess": 1}, "did you mean max_guesses"),
    ("openenv", {}, "needs url"), ("reasoning_gym", {}, "needs task"), ("word_game", {"words": []}, "of one length"),
])
def test_what_cannot_be_opened_is_one_line(name, options, message):
    with pytest.raises(UserError, match=message) as caught:
        open_environments(f"builtin:{name}", [], options)
    assert "\n" not in str(caught.value)


def test_each_of_them_is_a_function_or_class_with_a_docstring():
    assert all(callable(each) and each.__doc__ for each in BUILTINS.values())
