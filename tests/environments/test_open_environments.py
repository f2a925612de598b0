"""Environments and tools by name: what a user's file holds, and one line for each thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.open import open_environments
from hybrid_rlhf.rewards.functions import handed_over

FILE = '''
from __future__ import annotations

import builtins

NUM = []

class Shop:
    """Of TRL's kind."""

    def __init__(self, size: int = 3):
        NUM.append(size)
        self.size = size

    @property
    def stock(self):
        raise RuntimeError("there is none")

    def reset(self, **row) -> str | None:
        self.row = row

    def sell(self, thing: str) -> str:
        """Sell it.

        Args:
            thing: what
        """
        return thing

    async def buy(self, thing: str, num: int = 1) -> str:
        """Buy it.

        Args:
            thing: what
            num: how many
        """
        return thing * num

    def _count(self):
        return 1

    def get_reward(self) -> float:
        return 1.0

class Game:
    def step(self, messages):
        return [], True, 1.0

class Lift:
    """Its step is a tool."""
    def reset(self, floor: int, **row): ...
    def step(self, up: bool) -> str:
        """Go one floor.

        Args:
            up: or down
        """

class NoReset:
    def go(self) -> str:
        """Go."""

class Raises:
    def __init__(self):
        raise KeyError("no server")
    def reset(self): ...

class Needs:
    def __init__(self, url): ...
    def reset(self): ...

def make_shop():
    return Shop(7)

def nothing():
    return None

def search(word: str) -> str:
    """Search.

    Args:
        word: for what
    """
    return word

def sell(thing: str) -> str:
    """Sell it.

    Args:
        thing: what
    """

def wordless(thing: str): ...

number = 3
'''


@pytest.fixture
def path(tmp_path) -> str:
    (tmp_path / "shop.py").write_text(FILE)
    return str(tmp_path / "shop.py")


def test_a_class_of_trls_kind_is_opened_unchanged(path):
    environments = open_environments(f"{path}:Shop", [f"{path}:search"], {"size": 4})
    (kind,) = environments.kinds
    assert (kind.name, kind.has_step, kind.has_reward) == ("Shop", False, True)
    assert kind.tool_names == ["search", "buy", "sell"]  # plain ones, then methods in TRL's order
    assert kind.schemas[1]["function"]["parameters"]["required"] == ["thing"]
    assert environments.of({"environment": "of no meaning"}) is kind
    first, second = kind.new(), kind.new()
    assert first.object is not second.object and first.object.size == second.object.size == 4
    assert vars(__import__("sys").modules["reward_functions_shop"])["NUM"] == [4, 4]  # the one looked at is used
    assert first.is_async("buy") and not first.is_async("sell") and not first.is_async("search")


def test_a_step_of_messages_is_a_protocol_and_another_one_is_a_tool(path):
    (game,) = open_environments(f"{path}:Game", [], {}).kinds
    assert (game.tool_names, game.has_step, game.has_reward) == ([], True, False)
    (lift,) = open_environments(f"{path}:Lift", [], {}).kinds
    assert (lift.tool_names, lift.has_step, lift.needed) == (["step"], False, ("floor",))


def test_a_function_may_make_the_environment(path):
    assert open_environments(f"{path}:make_shop", [], {}).kinds[0].new().object.size == 7


def test_tools_alone_are_an_environment_without_object(path):
    (kind,) = open_environments(None, [f"{path}:search"], {}).kinds
    instance = kind.new()
    assert (kind.tool_names, kind.has_step, kind.has_reward, instance.object) == (["search"], False, False, None)
    assert instance.reset({"a": 1}) is None and instance.call("search", {"word": "a"}) == "a"


def test_a_row_chooses_among_several_by_name(path):
    environments = open_environments({"trade": f"{path}:Shop", "play": f"{path}:Game"}, [], {"trade": {"size": 2}})
    assert environments.of({"environment": "play"}).has_step
    assert environments.of({"environment": "trade"}).new().object.size == 2
    assert environments.columns_of({"environment": "play", "a": 1}) == {"a": 1}  # as TRL gives rows to reset
    for row in ({"environment": "trad"}, {"environment": None}, {}, {"environment": ["trade"]}):
        with pytest.raises(UserError, match=r"column environment of a row is .* has trade, play"):
            environments.of(row)
    with pytest.raises(UserError, match=r"several of them needs a column environment"):
        environments.check_columns(["prompt"])
    with pytest.raises(UserError, match=r"environment.options: trad is none of .*did you mean trade"):
        open_environments({"trade": f"{path}:Shop"}, [], {"trad": {}})
    with pytest.raises(UserError, match=r"environment\.options\.trade must be a mapping"):
        open_environments({"trade": f"{path}:Shop"}, [], {"trade": 3})


def test_columns_that_reset_needs_must_be_in_the_data(path):
    environments = open_environments(f"{path}:Lift", [], {})
    environments.check_columns(["prompt", "floor"])
    with pytest.raises(UserError, match=r"Lift needs a column floor, and the data has prompt, flor \(did you"):
        environments.check_columns(["prompt", "flor"])


def test_what_python_has_handed_over_is_found_by_name():
    class Here:
        def reset(self): ...

    with handed_over({"Here": Here}):
        assert open_environments("python:Here@12ab", [], {}).kinds[0].name == "Here"
    with pytest.raises(UserError, match="Here was given from Python, and nothing gives it here"):
        open_environments("python:Here@12ab", [], {})


@pytest.mark.parametrize(("name", "says"), [
    ("NoReset", r"NoReset has no method reset; .*reset\(\*\*row\), or step\(messages\)"),
    ("nothing", "NoneType has no method reset"),
    ("Raises", r"Raises: its constructor raised KeyError: 'no server' \(shop.py line \d+\); fix"),
    ("Needs", r"needs url; give environment.options '\{url: ...\}'"),
    ("number", "has no number that can be called"), ("Shpo", r"has no Shpo .*Shop, Game.*did you mean Shop")])
def test_a_class_that_is_no_environment_is_one_line(path, name, says):
    with pytest.raises(UserError, match=says) as refused:
        open_environments(f"{path}:{name}", [], {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("factory", "tools", "options", "says"), [
    ("{}:Shop", ["{}:sell"], {}, "Shop has a method sell, and environment.tools a function sell"),
    (None, ["{}:search", "{}:search"], {}, "two tools called search"),
    (None, ["{}:Shop"], {}, "is a class; give it as environment.factory"),
    (None, ["{}:wordless"], {}, "environment.tools: wordless has no docstring"),
    ("{}:Shop", [], {"sise": 3}, r"takes no sise \(did you mean size\?\); it takes size"),
    ("Shop", [], {}, "'Shop' names no function or class; give path.py:name"),
    ("gone.py:Shop", [], {}, "gone.py does not exist"),
    (None, [], {}, "neither environment.factory nor")])
def test_a_wrong_setting_is_one_line(path, factory, tools, options, says):
    with pytest.raises(UserError, match=says) as refused:
        open_environments(factory and factory.format(path), [t.format(path) for t in tools], options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "says"), [
    ("class Shop:\n  def reset(self:\n", "line 2 cannot be run: SyntaxError"),
    ("a = 1\nraise SystemExit(3)", "line 2 cannot be run: SystemExit: 3")])
def test_a_file_that_cannot_be_run_is_named_with_the_line(tmp_path: Path, text, says):
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UserError, match=f"environment.factory: .*bad.py {says}"):
        open_environments(f"{tmp_path}/bad.py:Shop", [], {})
