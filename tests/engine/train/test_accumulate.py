"""Micro-batches by hand, on an engine that only writes down what it is asked: no model is read here."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from hybrid_rlhf.core.errors import NotFinite, UserError
from hybrid_rlhf.engine.train import accumulate
from hybrid_rlhf.engine.train.accumulate import SCORE, UPDATE, Rows, halve_budget, score, split, token_budget

T = torch.tensor


class Noted:
    """An engine of `num_weights` weights. It tells what was asked of it in `told`."""

    def __init__(self, name: str = "actor", num_weights: int = 10, num_dummies: int = 0) -> None:
        self.name, self.num_dummies, self.told, self.oom_limits = name, num_dummies, [], {}
        self.device, self.is_active = torch.device("cpu"), False
        self.module = SimpleNamespace(parameters=lambda: [torch.zeros(num_weights)],
                                      train=lambda: self.told.append("train"))
        self.training = SimpleNamespace(
            learning_rate=0.5, stage=0, num_steps=7, num_skipped=3, num_skipped_in_a_row=0, max_skipped_in_a_row=4,
            loss_scale=None, discard_gradients=lambda: self.told.append("discard"), step=self.step,
            backward=lambda loss, is_last: self.told.append((float(loss), is_last, self.is_active)))
        self.norm, self.stage = 2.0, 0

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

    def step(self) -> float:
        self.told.append(("step", self.is_active))
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
    assert engine.told == ["train", (3.0, False, True), (1.0, False, True), "dummy", (0.0, True, True), ("step", True)]
    assert found.pop("memory/actor/update", 0) >= 0
    assert found == {"rows": pytest.approx((1 + 2 + 1) / 3), "grad_norm": 2.0, "train/skipped_updates": 3.0,
                     "learning_rate": 0.5, "micro_batch_tokens": 6.0}


def test_rows_of_no_micro_batch_still_step_with_the_others():
    engine = Noted(num_dummies=0)
    accumulate.accumulate(engine, 6, rows_of([]))
    assert engine.told == ["train", "dummy", (0.0, True, True), ("step", True)]


def test_a_micro_batch_that_does_not_fit_begins_the_step_again_with_half_its_tokens():
    engine = Noted()
    found = accumulate.accumulate(engine, 100, rows_of([4, 4, 4, 4], lambda index: len(index) > 1)).compute()
    assert engine.oom_limits == {UPDATE: 4}  # 16 tokens, then 8
    assert engine.told == ["train", "discard", "train", "discard", "train",
                           *((float(i), i == 4, True) for i in (1, 2, 3, 4)), ("step", True)]
    assert found["rows"] == 2.5 and found["micro_batch_tokens"] == 4.0


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


def test_the_budget_is_what_was_set_or_less():
    engine = Noted()
    engine.oom_limits = {SCORE: 50, UPDATE: 200}
    assert [token_budget(engine, phase, 100) for phase in (SCORE, UPDATE, "other")] == [50, 100, 100]


def test_rows_that_share_a_prefix_stay_together_and_others_are_cut_by_length():
    engine = Noted()
    assert [g.tolist() for g in split(engine, T([5, 1, 5, 1]), 10, T([0, 1, 0, 1]))] == [[0, 2], [1, 3]]
    # a pass costs 64 tokens and 5e9 over the number of weights: with 10 no padding is worth another, with 5e9 66 are
    assert [g.tolist() for g in split(engine, T([1, 90, 90]), 270, None)] == [[1, 2, 0]]
    large = Noted(num_weights=0)
    large.module.parameters = lambda: [SimpleNamespace(numel=lambda: 5 * 10**9)]
    assert [sorted(g.tolist()) for g in split(large, T([24, 90]), 270, None)] == [[1], [0]]
    assert [sorted(g.tolist()) for g in split(large, T([25, 90]), 270, None)] == [[0, 1]]


def test_on_a_card_another_pass_costs_three_hundred_times_as_many_products():
    # 1.5e12 over 5e9 weights are 300 tokens, and 64: from 400 down to 35 padding costs 365, to 37 it costs 363
    engine = Noted()
    engine.device = torch.device("cuda")
    engine.module.parameters = lambda: [SimpleNamespace(numel=lambda: 5 * 10**9)]
    assert [sorted(g.tolist()) for g in split(engine, T([35, 400]), 800, None)] == [[1], [0]]
    assert [sorted(g.tolist()) for g in split(engine, T([37, 400]), 800, None)] == [[0, 1]]


def test_among_several_processes_micro_batches_are_as_few_as_possible(monkeypatch):
    monkeypatch.setattr(accumulate, "world_size", lambda: 2)
    large = Noted()
    large.module.parameters = lambda: [SimpleNamespace(numel=lambda: 5 * 10**9)]
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


def test_half_of_a_micro_batch_is_kept_as_a_limit_and_told(caplog):
    engine, error = Noted(), torch.OutOfMemoryError("CUDA out of memory")
    assert halve_budget(engine, UPDATE, T([5, 3, 1]), error) == 7 and engine.oom_limits == {UPDATE: 7}
    assert caplog.messages == ["out of memory in the actor's update: a micro-batch of 15 tokens (3 x 5) does not fit; "
                               "from now on at most 7 tokens"]
    with pytest.raises(UserError, match=r"5 tokens \(1 x 5\) is a single row"):
        halve_budget(engine, UPDATE, T([5]), error)


def test_what_is_not_about_memory_is_raised():
    def scored(index: torch.Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(score(Noted(), T([5, 3]), 8, scored))


@pytest.mark.parametrize(("stage", "phase", "is_so"), [(0, UPDATE, True), (1, UPDATE, True), (2, SCORE, False),
                                                       (3, SCORE, True)])
def test_others_wait_for_a_process_in_every_update_and_in_scoring_by_parts(stage, phase, is_so, monkeypatch):
    engine = Noted()
    engine.stage = stage
    assert not accumulate._meets_others(engine, phase)  # alone nobody waits
    monkeypatch.setattr(accumulate, "world_size", lambda: 2)
    assert accumulate._meets_others(engine, phase) == is_so


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
