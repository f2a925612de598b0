"""Micro-batches by hand, on an engine that only writes down what it is asked: no model is read here."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import NotFinite, UserError
from hybrid_rlhf.engine.train import accumulate
from hybrid_rlhf.engine.train.accumulate import (
    SCORE,
    UPDATE,
    Rows,
    agree_on_limit,
    halve_budget,
    score,
    split,
)

T = torch.tensor


class Noted:
    """An engine of `num_weights` weights at a stage of ZeRO. `told`: what was asked of it."""

    def __init__(self, stage: int = 0, *, num_weights: int = 10, num_dummies: int = 0) -> None:
        self.name, self.num_dummies, self.told, self.oom_limits = "actor", num_dummies, [], {}
        self.device, self.is_active, self.stage, self.norm = torch.device("cpu"), False, stage, 2.0
        self.module = SimpleNamespace(parameters=lambda: [SimpleNamespace(numel=lambda: num_weights)],
                                      train=lambda: self.told.append("train"))
        self.training = SimpleNamespace(
            learning_rate=0.5, stage=0, num_steps=7, num_skipped=3, num_skipped_in_a_row=0, max_skipped_in_a_row=4,
            loss_scale=None, discard_gradients=lambda: self.told.append("discard"), step=self.step,
            backward=self.backward)

    @contextmanager
    def active(self):
        self.is_active = True
        yield
        self.is_active = False

    def num_forwards(self, own: int) -> int:
        return own + self.num_dummies if own else 0

    def dummy_forward(self) -> torch.Tensor:
        self.told.append("dummy")
        return T(0.0)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        assert self.is_active
        self.told.append((float(loss), is_last))

    def step(self) -> float:
        assert self.is_active
        self.told.append("step")
        return self.norm


def rows_of(lengths: list[int], fails=lambda index: False, prefix_groups=None) -> Rows:
    """The loss of a micro-batch is the sum of its rows' numbers, counted from 1."""
    def loss(index: torch.Tensor) -> tuple[torch.Tensor, dict]:
        if fails(index.tolist()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (index + 1).sum(), {"rows": ((index + 1.0).mean(), len(index))}

    return Rows(T(lengths), loss, prefix_groups)


def test_a_step_is_one_backward_a_micro_batch_the_last_one_marked_and_dummies_where_others_wait():
    engine = Noted(num_dummies=1)
    # 3 + 3 tokens fit into 6; the row of another kind is a micro-batch of its own
    found = accumulate.accumulate(engine, 6, rows_of([3, 3]), rows_of([4])).compute()
    assert engine.told == ["train", (3.0, False), (1.0, False), "dummy", (0.0, True), "step"]
    assert found.pop("memory/actor/update", 0) >= 0
    assert found == {"rows": pytest.approx((1 + 2 + 1) / 3), "grad_norm": 2.0, "train/skipped_updates": 3.0,
                     "learning_rate": 0.5, "micro_batch_tokens": 6.0}


def test_rows_of_no_micro_batch_still_step_with_the_others():
    engine = Noted(num_dummies=0)
    accumulate.accumulate(engine, 6, rows_of([]))
    assert engine.told == ["train", "dummy", (0.0, True), "step"]


def test_what_fails_before_any_micro_batch_is_no_matter_of_their_size():
    engine = Noted()

    def refuse() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    engine.dummy_forward = refuse
    with pytest.raises(UserError, match="out of memory while updating the actor; --preset"):
        accumulate.accumulate(engine, 6, rows_of([]))
    assert engine.told[-1] == "discard" and engine.oom_limits == {}


def test_an_optimizer_that_does_not_fit_is_told_with_its_own_advice():
    engine = Noted()
    engine.training.step = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match=r"^out of memory in the actor's optimizer step; its state does not fit: train "
                                        r"fewer weights \(model\.lora\.r\) or take a smaller model$"):
        accumulate.accumulate(engine, 6, rows_of([3]))


def test_a_gradient_that_is_no_number_is_counted_told_and_at_last_refused(caplog):
    engine = Noted()
    training = engine.training
    engine.norm, training.num_skipped_in_a_row, training.loss_scale = float("inf"), 3, 1024.0
    found = accumulate.accumulate(engine, 6, rows_of([3])).compute()
    assert "grad_norm" not in found and found["train/loss_scale"] == 1024.0 and found["train/skipped_updates"] == 3.0
    assert caplog.messages == ["the actor's gradient is not finite (norm inf): update 7 is skipped, 3 in a row; the "
                               "loss scale of float16 is now 1024"]
    training.num_skipped_in_a_row, training.loss_scale = 1, None
    assert "train/loss_scale" not in accumulate.accumulate(engine, 6, rows_of([3])).compute()
    assert caplog.messages[1] == "the actor's gradient is not finite (norm inf): update 7 is skipped, 1 in a row"
    training.num_skipped_in_a_row = 4
    with pytest.raises(NotFinite, match=r"^the actor's gradient was not finite in 4 updates in a row; lower "
                                        r"train\.learning_rate"):
        accumulate.accumulate(engine, 6, rows_of([3]))
    engine.name = "critic"
    with pytest.raises(NotFinite) as refused:
        accumulate.accumulate(engine, 6, rows_of([3]))
    assert "train.learning_rate (roles.actor" not in str(refused.value)


def test_rows_that_share_a_prefix_stay_together_and_others_are_cut_by_length():
    engine = Noted()
    assert [g.tolist() for g in split(engine, T([5, 1, 5, 1]), 10, T([0, 1, 0, 1]))] == [[0, 2], [1, 3]]
    # a pass costs 64 tokens and 5e9 over the number of weights: with 10 no padding is worth another, with 5e9 66 are
    assert [g.tolist() for g in split(engine, T([1, 90, 90]), 270, None)] == [[1, 2, 0]]
    large = Noted(num_weights=5 * 10**9)
    assert [sorted(g.tolist()) for g in split(large, T([24, 90]), 270, None)] == [[1], [0]]
    assert [sorted(g.tolist()) for g in split(large, T([25, 90]), 270, None)] == [[0, 1]]


def test_on_a_card_another_pass_costs_three_hundred_times_as_many_products():
    # 1.5e12 over 5e9 weights are 300 tokens, and 64: from 400 down to 35 padding costs 365, to 37 it costs 363
    engine = Noted(num_weights=5 * 10**9)
    engine.device = torch.device("cuda")
    assert [sorted(g.tolist()) for g in split(engine, T([35, 400]), 800, None)] == [[1], [0]]
    assert [sorted(g.tolist()) for g in split(engine, T([37, 400]), 800, None)] == [[0, 1]]


def test_among_several_processes_micro_batches_are_as_few_as_possible(monkeypatch):
    monkeypatch.setattr(accumulate, "world_size", lambda: 2)
    large = Noted(num_weights=5 * 10**9)
    assert [sorted(g.tolist()) for g in split(large, T([1, 90]), 270, None)] == [[0, 1]]


@pytest.mark.parametrize("groups", [None, [0, 0, 1, 1]])
def test_scoring_goes_on_with_what_is_left_where_memory_runs_out(groups):
    engine, seen = Noted(num_dummies=2), []

    def scored(index: torch.Tensor) -> list[int]:
        seen.append(index.tolist())
        if len(index) > 2 or seen[-1] == [2, 3]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [10 * i for i in index.tolist()]

    found = list(score(engine, T([3, 3, 3, 3]), 12, scored, None if groups is None else T(groups)))
    assert seen == [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]
    assert [(index.tolist(), value) for index, value in found] == [([0, 1], [0, 10]), ([2], [20]), ([3], [30])]
    assert engine.oom_limits == {SCORE: 3} and engine.told == ["dummy", "dummy"]


def test_what_is_left_stays_together_by_prefix_where_memory_runs_out():
    """By length alone 1 and 2, of three tokens each, would be one micro-batch."""
    seen = []

    def scored(index: torch.Tensor) -> None:
        seen.append(index.tolist())
        if len(index) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    list(score(Noted(), T([1, 3, 3, 1]), 12, scored, T([0, 1, 0, 1])))
    assert seen == [[0, 2, 1, 3], [0, 2], [1, 3]]


def test_scoring_keeps_to_the_limit_that_was_found_before():
    engine = Noted()
    engine.oom_limits = {SCORE: 6, UPDATE: 3}
    assert [len(found) for _, found in score(engine, T([3, 3, 3, 3]), 12, lambda index: index)] == [2, 2]


def test_memory_that_can_be_given_back_goes_before_the_micro_batch_is_cut(monkeypatch, caplog):
    monkeypatch.setattr(accumulate, "give_back_idle", lambda: True)
    engine = Noted()
    assert halve_budget(engine, SCORE, T([5, 3]), torch.OutOfMemoryError("CUDA out of memory")) == 10
    assert engine.oom_limits == {}
    assert caplog.messages == ["out of memory in the actor's score; the decode cache is not kept between rollouts any "
                               "more"]


@pytest.mark.parametrize("num_steps, told", [
    (0, ["the actor's loss does not depend on 1 weight (unused), which are trained and get no gradient: freeze them "
         "(model.freeze), or leave them out of lora.target_modules"]), (1, [])])
def test_weights_that_the_first_step_gives_no_gradient_are_named_once(num_steps, told, caplog):
    engine, names = Noted(), ("used", "zero", "unused", "experts.3", "embedding")
    weights = {name: torch.ones(1, requires_grad=True) for name in names}
    engine.training.parameters, engine.training.num_steps = weights, num_steps
    engine.training.backward = lambda loss, is_last: loss.backward()
    engine.training.takes_rows = lambda weight: weight is weights["embedding"]
    # a gradient of zeros, as the first one of an adapter's A, is a gradient; an expert may not have been chosen
    rows = Rows(T([5, 3]), lambda index: ((index * weights["used"] + 0.0 * weights["zero"]).sum(), {}))
    accumulate.accumulate(engine, 5, rows)
    assert caplog.messages == told and weights["used"].grad is not None


# -- memory runs out on one of several processes: all begin again under one limit ------------------------------------


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
