"""The games by hand: what is answered, what it is worth, and when it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.builtin.games import (
    WORDS,
    GuessNumber,
    GuessNumberTool,
    WordGame,
    marks,
    number_rows,
    word_rows,
)
from hybrid_rlhf.environments.open import open_environments


def said(text: str) -> list[dict]:
    return [{"role": "user", "content": "Let us play."}, {"role": "assistant", "content": text}]


def answer(environment, text: str) -> tuple[str, bool, float]:
    [message], is_over, reward = environment.step(said(text))
    assert message["role"] == "user" and list(message) == ["role", "content"]
    return message["content"], is_over, reward


def test_a_game_of_numbers_by_hand():
    game = GuessNumber(max_guesses=5, cost=0.1)
    rules = game.reset(secret=42, prompt="Let us play.", low=1, high=None)
    assert "from 1 to 100" in rules and "5 guesses" in rules
    assert answer(game, "Is it 50?") == ("lower", False, -0.1)
    assert answer(game, "not 50, so 25") == ("higher", False, -0.1)
    assert answer(game, "I do not know") == ("Say a number from 1 to 100.", False, -0.1)
    assert answer(game, "42.0!") == ("right", True, 1.0)


def test_a_game_ends_after_the_last_guess_and_can_be_played_again():
    game = GuessNumber(low=0, high=9, max_guesses=2, has_rules=False)
    for _ in range(2):
        assert game.reset(secret=3) is None
        assert answer(game, "") == ("Say a number from 0 to 9.", False, -0.05)
        assert answer(game, "1e999") == ("lower", True, -0.05)


@given(st.integers(0, 10**6))
def test_binary_search_finds_a_drawn_number_in_seven_guesses(seed):
    game, tool = GuessNumber(max_guesses=7), GuessNumberTool(max_guesses=7, cost=0.25)
    game.reset(seed=seed)
    tool.reset(seed=seed)
    low, high, wrong, is_over, reward = 1, 100, 0, False, 0.0
    while not is_over:
        middle = (low + high) // 2
        heard, is_over, reward = answer(game, str(middle))
        assert tool.guess(middle) == heard
        low, high = (middle + 1, high) if heard == "higher" else (low, middle - 1)
        wrong += heard != "right"
    assert reward == 1.0 and tool.get_reward() == 1 - 0.25 * wrong


def test_the_game_with_a_tool_by_hand():
    game = GuessNumberTool(max_guesses=3, cost=0.1)
    assert "guess" in game.reset(secret=42)
    assert game.get_reward() == 0
    assert [game.guess(50), game.guess(42), game.guess(42)] == ["lower", "right", "The game is over."]
    assert game.get_reward() == pytest.approx(0.9)
    game.reset(secret=1)
    assert [game.guess(n) for n in (9, 8, 7, 1)] == ["lower", "lower", "lower", "The game is over."]
    assert game.get_reward() == pytest.approx(-0.3)


@pytest.mark.parametrize("guess, secret, signs", [
    ("crane", "crane", "+++++"), ("babes", "abbey", "??++-"), ("kebab", "abbey", "-?+??"), ("speed", "erase", "?-??-"),
    ("geese", "eerie", "-+?-+"), ("allee", "apple", "+?--+"), ("zzzzz", "apple", "-----"), ("eerie", "geese", "?+--+"),
])
def test_letters_are_marked_as_often_as_the_secret_has_them(guess, secret, signs):
    assert marks(guess, secret) == signs


def test_a_game_of_words_by_hand():
    game = WordGame(max_guesses=3, cost=0.1, partial=0.5)
    assert "5 letters" in game.reset(secret="Abbey")
    assert answer(game, "My first guess: BABES") == ("b? a? b+ e+ s-", False, -0.1)
    assert answer(game, "hm") == ("Say a word of 5 letters.", False, -0.1)
    assert answer(game, "babes") == ("b? a? b+ e+ s-", True, pytest.approx(0.5 * 2 / 5 - 0.1))
    game.reset(secret="abbey")
    assert answer(game, "abbey.") == ("right", True, 1.0)


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_and_seeds_draw_the_same_secrets_every_time(seed):
    numbers, words = number_rows(50, seed, 5, 9), word_rows(50, seed)
    assert numbers == number_rows(50, seed, 5, 9) and {row["secret"] for row in numbers} == {5, 6, 7, 8, 9}
    assert words == word_rows(50, seed) and all(row["secret"] in WORDS for row in words)
    for game, row in ((GuessNumber(), numbers[0]), (GuessNumberTool(), numbers[0]), (WordGame(), words[0])):
        game.reset(**row)


def test_a_seed_draws_this_number():
    game = GuessNumber()
    game.reset(seed=0)
    assert answer(game, "50") == ("right", True, 1.0)  # random.Random(0).randint(1, 100), as Python has always drawn it


@pytest.mark.parametrize("make, message", [
    (lambda: GuessNumber(low=3, high=2), "low must not be above high"),
    (lambda: GuessNumber(max_guesses=0), "at least 1"), (lambda: WordGame(words=["a", "bc"]), "of one length"),
    (lambda: GuessNumber().reset(), "neither a secret nor a seed"),
    (lambda: GuessNumberTool().reset(prompt="x"), "neither a secret nor a seed"),
    (lambda: GuessNumber().reset(secret=101), "from 1 to 100"),
    (lambda: WordGame().reset(), "neither a secret nor a seed"),
])
def test_what_cannot_be_played_is_one_line(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


# -- What is built in, opened as the settings name it: by its tools' schemas and through a whole episode ---------------


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
