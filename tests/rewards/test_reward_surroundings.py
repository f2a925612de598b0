"""What a reward function does to the process around it, and when its time is up, takes the place of no answer."""

from __future__ import annotations

import os
import random
import tempfile
import time

import numpy as np
import pytest
import torch

from hybrid_rlhf.rewards import BadAnswer, checked_scores, user_code
from hybrid_rlhf.rewards.functions import FunctionSource
from tests.factories.rollouts import rollout


def lengths(completions, **_):
    return [len(c) for c in completions]


def test_a_setting_that_cannot_be_read_changes_no_answer(monkeypatch):
    """torch 2.13 refuses to tell a precision in the older way once it was set in the newer one."""
    def refuse(*_given):
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(user_code, "_SETTINGS", user_code._SETTINGS | {"unread": (refuse, refuse)})
    assert checked_scores(FunctionSource("good", lengths), rollout()).tolist() == [3.0, 8.0, 3.0]

    @user_code.unchanged("x")
    def fails() -> None:
        torch.set_grad_enabled(False)
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        fails()
    assert torch.is_grad_enabled()


def test_a_working_directory_that_was_removed_is_left_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def leaves_a_removed_one(completions, **_):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        return lengths(completions)

    assert checked_scores(FunctionSource("good", leaves_a_removed_one), rollout()).tolist() == [3.0, 8.0, 3.0]
    assert os.getcwd() == str(tmp_path)


def test_a_setting_that_cannot_be_restored_changes_no_answer_and_the_generators_are(tmp_path, monkeypatch, caplog):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    def removes_it(completions, **_):
        os.chdir(tmp_path)
        os.rmdir("gone")
        random.random()
        return lengths(completions)

    random.seed(3)
    drawn = [random.random() for _ in range(2)]
    random.seed(3)
    assert checked_scores(FunctionSource("good", removes_it), rollout()).tolist() == [3.0, 8.0, 3.0]
    assert "good changes the working directory for the whole process, and it cannot be restored: " in caplog.text
    assert random.random() not in drawn


DRAWS = {"python": random.random, "numpy": np.random.random, "torch": lambda: torch.rand(()).item()}


@pytest.mark.parametrize("moved", DRAWS)
def test_only_the_generator_that_was_drawn_from_goes_on_from_another_seed(moved):
    def seed() -> None:
        random.seed(3), np.random.seed(3), torch.manual_seed(3)

    seed()
    plain = {name: [draw(), draw()] for name, draw in DRAWS.items()}
    seed()
    with user_code.unchanged("x"):
        pass
    with user_code.unchanged("x"):
        drawn = DRAWS[moved]()
    after = {name: [draw(), draw()] for name, draw in DRAWS.items()}
    assert drawn == plain[moved][0]
    assert not {drawn, *plain[moved]} & set(after.pop(moved))
    assert after == {name: values for name, values in plain.items() if name != moved}


def test_what_is_raised_after_the_time_is_up_is_named():
    def clears_up(completions, **_):
        try:
            time.sleep(5)
        finally:
            raise ConnectionError("reset by peer")

    with pytest.raises(BadAnswer, match=r"no answer within 0.1 s .*then it raised ConnectionError: reset by peer"):
        checked_scores(FunctionSource("bad", clears_up, timeout=0.1), rollout())
