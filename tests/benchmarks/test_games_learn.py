"""The game that a small model learns: its demonstrations show no strategy, and it learns one."""

from __future__ import annotations

import random

import games_learn
import pytest


def test_demonstrations_have_no_strategy() -> None:
    rng = random.Random(0)
    games = [games_learn.random_game(rng) for _ in range(4000)]
    guesses = [[int(m["content"]) for m in game if m["role"] == "assistant"] for game in games]
    assert all(game[-1]["role"] == "assistant" and len(said) <= 10 for game, said in zip(games, guesses, strict=True))
    assert sum(map(len, guesses)) / len(guesses) == pytest.approx(7.609, abs=0.15)  # 1 + 15/16 + ... + (15/16)^9


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_that_guesses_at_random_learns_to_search(tmp_path) -> None:
    """A third of the benchmark's steps, which end at 5.3 turns; 512 games, so a standard error of 0.1."""
    folder = tmp_path / "seed0"
    games_learn.train(folder, 0, ["--train.max_steps=150"], ["--train.max_steps=40"])
    before, after = (games_learn.measured(f"{folder}/{stage}/model", 1.0, 0, 32) for stage in ("sft", "ppo"))
    assert before.turns > 7 and before.won < 0.6
    assert after.turns < 6.2 and after.won > 0.75
