"""The benchmark of a model that learns from marks: what is judged was never marked, and each figure is of all marks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import teach
import torch


class Counting:
    """A learner whose weight, which has no master, is the number of its marks."""

    def __init__(self, *marks: str, is_exact: bool = True) -> None:
        self.marks, self.is_exact, self.weight = list(marks), is_exact, torch.tensor([float(len(marks))])
        self.engine = SimpleNamespace(training=SimpleNamespace(shard=lambda: {
            "optimizer": {"a": {"exp_avg": torch.zeros(1)}}, "weights": {"a": self.weight}}))

    def undo(self) -> str:
        self.weight = self.weight - 1.0 * self.is_exact
        return self.marks.pop()

    def learn(self, mark: str) -> None:
        self.marks.append(mark)
        self.weight = self.weight + 1.0


def test_undo_is_tried_on_weights_too_and_leaves_all_marks_for_the_comparison():
    learner = Counting("one", "two")
    assert teach.undone(learner) and learner.marks == ["one", "two"]
    assert not teach.undone(Counting("one", "two", is_exact=False))


@pytest.mark.parametrize("marks", ["13", "0"])
def test_no_question_is_both_marked_and_judged(capsys, marks):
    for seed in range(20):
        asked = teach.questions(seed)
        assert not set(asked[:12]) & set(asked[-teach.NUM_HELD_OUT:]) and len(set(asked)) == 28
    with pytest.raises(SystemExit):
        teach.main(["--model", "none", "--marks", marks])
    assert "12 questions can be marked" in capsys.readouterr().err
