"""The game that a small model learns: the figures that it is held against, by hand, and that it learns."""

from __future__ import annotations

import random

import games_learn
import pytest


def test_the_players_figures_are_those_worked_out_by_hand() -> None:
    # 1 secret in the first turn, 2 in the second, 4, 8, and the last one in the fifth: (1 + 4 + 12 + 32 + 5) / 16
    assert games_learn.binary_search(16, 10) == (54 / 16, 1)
    assert games_learn.binary_search(16, 2) == pytest.approx(((1 + 15 * 2) / 16, 3 / 16))
    # of 2: right at once, or the other; of 3, the middle: 1 2 2, an end: 1 and then as of 2 (2.5 on average)
    assert games_learn.consistent_player(2, 10) == (1.5, 1)
    assert games_learn.consistent_player(3, 10) == pytest.approx(((2 * (1 + 2 * 2.5) + (1 + 2 + 2)) / 9, 1))
    assert games_learn.random_player(2, 3) == (1 + 1 / 2 + 1 / 4, 1 - 1 / 8)


def test_a_consistent_player_who_is_simulated_has_the_figures() -> None:
    rng, turns = random.Random(0), []
    for game in range(8000):
        low, high, secret, guess = 1, 16, 1 + game % 16, 0
        for turn in range(1, 17):
            guess = rng.randint(low, high)
            if guess == secret:
                turns.append(turn)
                break
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    assert sum(turns) / len(turns) == pytest.approx(games_learn.consistent_player().turns, abs=0.05)


def test_demonstrations_have_no_strategy() -> None:
    rng = random.Random(0)
    games = [games_learn.random_game(rng) for _ in range(4000)]
    guesses = [[int(m["content"]) for m in game if m["role"] == "assistant"] for game in games]
    assert all(game[-1]["role"] == "assistant" and len(said) <= 10 for game, said in zip(games, guesses, strict=True))
    assert sum(map(len, guesses)) / len(guesses) == pytest.approx(games_learn.random_player().turns, abs=0.15)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_that_guesses_at_random_learns_to_search(tmp_path) -> None:
    """A third of the benchmark's steps, which end at 5.3 turns; 512 games, so a standard error of 0.1."""
    folder = tmp_path / "seed0"
    games_learn.train(folder, 0, ["--train.max_steps=150"], ["--train.max_steps=40"])
    before, after = (games_learn.measured(f"{folder}/{stage}/model", 1.0, 0, 32) for stage in ("sft", "ppo"))
    assert before.turns > 7 and before.won < 0.6
    assert after.turns < 6.2 and after.won > 0.75
