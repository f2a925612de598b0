"""Running out of memory on one of several processes, by hand: the passes go on to the last one, and all begin again
under one limit. On an engine that writes down what it is asked; what the others say is written in the tests."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import UserError
from hybrid_rlhf.engine.train import accumulate
from hybrid_rlhf.engine.train.accumulate import SCORE, UPDATE, Rows, agree_on_limit, score

T = torch.tensor


class Noted:
    """An engine of a stage of ZeRO, whose processes run `num_forwards` passes. `told`: what was asked of it."""

    def __init__(self, stage: int = 0) -> None:
        self.name, self.told, self.oom_limits, self.stage = "actor", [], {}, stage
        self.device = torch.device("cpu")
        self.module = SimpleNamespace(parameters=lambda: [torch.zeros(10)], train=lambda: self.told.append("train"))
        self.training = SimpleNamespace(
            learning_rate=0.5, num_steps=0, parameters={}, num_skipped=0, num_skipped_in_a_row=0,
            max_skipped_in_a_row=4, loss_scale=None,
            discard_gradients=lambda: self.told.append("discard"), step=lambda: self.told.append("step") or 2.0,
            backward=lambda loss, is_last: self.told.append((float(loss), is_last)))
        self.num_forwards = lambda own: own

    @contextmanager
    def active(self):
        yield

    def dummy_forward(self) -> torch.Tensor:
        self.told.append("dummy")
        return T(0.0)


@pytest.fixture
def others(monkeypatch):
    """Two processes. asked: what this one said of its shortages and limits; says: what comes of it over both."""
    made = SimpleNamespace(asked=[], says=[])
    monkeypatch.setattr(accumulate, "world_size", lambda: 2)
    monkeypatch.setattr(accumulate, "max_over_ranks", lambda own: made.asked.append(own) or (
        made.says.pop(0) if made.says else own))
    monkeypatch.setattr(accumulate, "attempt", attempt)
    monkeypatch.setattr(accumulate, "forget", lambda module: made.asked.append("forget"))
    monkeypatch.setattr(accumulate, "release", lambda: made.asked.append("release"))
    return made


def attempt(module, run, least=None, undo=lambda: None):
    """A pass that runs out of memory is undone, and the least of a pass is run in its place."""
    try:
        run()
    except torch.OutOfMemoryError as error:
        if least is not None:
            undo()
            least()
        return error
    return None


def rows_of(lengths: list[int], fails=lambda index: False) -> Rows:
    """The loss of a micro-batch is the sum of its rows' numbers, counted from 1."""
    def loss(index: torch.Tensor) -> tuple[torch.Tensor, dict]:
        if fails(index.tolist()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (index + 1).sum(), {"rows": ((index + 1.0).mean(), len(index))}

    return Rows(T(lengths), loss)


def test_who_runs_out_goes_on_to_the_last_pass_with_the_least_and_begins_again_with_half(others):
    engine = Noted()
    found = accumulate.accumulate(engine, 6, rows_of([3, 3, 3, 3], lambda index: index == [0, 1])).compute()
    assert engine.told == ["train", "discard", "dummy", (0.0, False), "dummy", (0.0, True), "discard",
                           "train", (1.0, False), (2.0, False), (3.0, False), (4.0, True), "step"]
    assert others.asked == [1, "forget", -3, "release", 0] and engine.oom_limits == {UPDATE: 3}
    assert found["rows"] == 2.5 and found["micro_batch_tokens"] == 3.0


def test_the_least_in_the_place_of_the_last_pass_is_the_last_one(others):
    engine = Noted()
    accumulate.accumulate(engine, 6, rows_of([3, 3], lambda index: len(index) > 1))
    assert engine.told[:5] == ["train", "discard", "dummy", (0.0, True), "discard"]


def test_who_did_not_run_out_begins_again_under_the_limit_of_who_did(others, caplog):
    others.says += [1, -3, 0]
    engine = Noted()
    accumulate.accumulate(engine, 6, rows_of([3, 3]))
    assert engine.told == ["train", (3.0, True), "discard", "train", (1.0, False), (2.0, True), "step"]
    assert others.asked == [0, "forget", -sys.maxsize, "release", 0] and engine.oom_limits == {UPDATE: 3}
    assert caplog.messages == ["out of memory in the actor's update on another process; from now on a micro-batch has "
                               "at most 3 tokens on all"]


def test_the_lowest_limit_counts_and_only_a_lower_one_is_told(others, caplog):
    engine = Noted()
    for own, after in ((50, 40), (40, 40), (30, 30)):
        engine.oom_limits = {UPDATE: own, SCORE: 7}
        others.says = [max(-own, -40)]
        agree_on_limit(engine, UPDATE)
        assert engine.oom_limits == {UPDATE: after, SCORE: 7}
    assert len(caplog.messages) == 1 and others.asked == [-50, -40, -30]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_pass_of_the_least_that_does_not_fit_ends_the_run(others, monkeypatch, is_first):
    """In the place of rows, or behind a micro-batch that did not fit."""
    engine, number = Noted(), []

    def failing(module, run, least=None, undo=lambda: None):
        number.append(len(number))
        return torch.OutOfMemoryError(f"CUDA out of memory {number[-1]}")

    monkeypatch.setattr(accumulate, "attempt", failing)
    with pytest.raises(UserError, match=r"^out of memory while updating the actor; ") as found:
        accumulate.accumulate(engine, 6, rows_of([] if is_first else [3, 3, 3]))
    assert str(found.value.__cause__) == f"CUDA out of memory {0 if is_first else 1}" and engine.told[-1] == "discard"


def test_alone_nothing_follows_a_micro_batch_that_did_not_fit():
    engine = Noted()
    accumulate.accumulate(engine, 6, rows_of([3, 3, 3, 3], lambda index: len(index) > 1))
    assert engine.told == ["train", "discard", "train", (1.0, False), (2.0, False), (3.0, False), (4.0, True), "step"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scoring_meets_the_others_in_every_pass_of_parts_and_takes_their_limit_where_passes_are_counted(others, stage):
    """Two micro-batches of ours, of which the first does not fit; the other process runs three passes, then none."""
    engine = Noted(stage)
    engine.num_forwards = lambda own: max(own, 3) if own else 0

    def scored(index: torch.Tensor) -> int:
        if len(index) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        engine.told.append(index.tolist())
        return 10 * int(index)

    found = sorted((index.tolist(), value) for index, value in score(engine, T([3, 3, 3, 3]), 6, scored))
    assert found == [([i], 10 * i) for i in range(4)] and engine.oom_limits == {SCORE: 3}
    dummies = engine.told.index([0])
    # at 3: the least in the place of the first pass, and two more; else nobody waits, and the other passes are left out
    assert dummies == {0: 0, 2: 0, 3: 3}[stage] and engine.told[dummies:] == [[0], [1], [2], [3]]
    assert others.asked == ["release"] + (["forget", -3] if stage >= 2 else [])


def test_who_has_scored_all_keeps_step_with_who_has_not_and_takes_its_limit(others):
    engine, passes = Noted(2), iter([1, 2, 0])
    engine.num_forwards = lambda own: next(passes)
    others.says += [-5]
    assert [value for _, value in score(engine, T([3]), 6, len)] == [1]
    assert engine.told == ["dummy", "dummy"] and others.asked == ["forget", -sys.maxsize]
    assert engine.oom_limits == {SCORE: 5}
