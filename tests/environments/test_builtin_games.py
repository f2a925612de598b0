"""The games by hand: what is answered, what it is worth, and when it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.environments.builtin import BUILTINS
from hybrid_rlhf.environments.builtin.games import (
    WORDS,
    GuessNumber,
    GuessNumberTool,
    WordGame,
    marks,
    number_rows,
    word_rows,
)


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


@given(st.integers(1, 1000), st.text(max_size=50))
def test_no_message_makes_a_game_longer(secret, text):
    game = GuessNumber(high=1000, max_guesses=3)
    game.reset(secret=secret)
    ends = [answer(game, text)[1] for _ in range(3)]
    assert ends[-1] is True


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
    (lambda: GuessNumber(max_guesses=0), "at least 1"),
    (lambda: GuessNumberTool(low=3, high=2), "low must not be above high"),
    (lambda: WordGame(words=[]), "of one length"),
    (lambda: WordGame(words=["a", "bc"]), "of one length"), (lambda: WordGame(words=["a b"]), "of one length"),
    (lambda: WordGame(max_guesses=0), "at least 1"), (lambda: GuessNumber().reset(), "neither a secret nor a seed"),
    (lambda: GuessNumberTool().reset(prompt="x"), "neither a secret nor a seed"),
    (lambda: GuessNumber().reset(secret=101), "from 1 to 100"),
    (lambda: GuessNumber().reset(secret="5"), "from 1 to 100"),
    (lambda: GuessNumber().reset(seed=1, low=9, high=8), "low must not be above"),
    (lambda: WordGame().reset(), "neither a secret nor a seed"),
    (lambda: WordGame().reset(secret="two words"), "one word"),
])
def test_what_cannot_be_played_is_one_line(make, message):
    with pytest.raises(UserError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_games_are_built_in():
    assert [BUILTINS[name] for name in ("guess_number", "guess_number_tool", "word_game")] == [
        GuessNumber, GuessNumberTool, WordGame]
