"""The tensor functions that every package shares, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.tensors import (
    KeptSets,
    SequenceBatch,
    last_true,
    length_mask,
    masked_mean,
    masked_sum,
    pad_right,
    predicted,
    predicting,
    prefix_groups_within,
    scatter,
    summed_by_row,
    to_device,
)

T = torch.tensor


def batch_of(*rows: list[int]) -> SequenceBatch:
    real = length_mask([len(row) for row in rows])
    return SequenceBatch(pad_right(rows, 0), real, real)


def sets(*rows: list[list[int]]) -> KeptSets:
    return KeptSets.of_rows([[T(kept, dtype=torch.int32) for kept in row] for row in rows])


def test_only_what_goes_from_the_host_to_a_device_is_pinned_and_not_waited_for(monkeypatch):
    pinned, waits, plain = [], [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(len(self)) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking=False: waits.append(
        (str(device), non_blocking)) or plain(self, device))
    host = torch.zeros(3)
    assert to_device(host, "cpu") is host
    away = to_device(host, "meta")
    assert away.device.type == "meta" and to_device(away, "meta").device.type == "meta"
    assert pinned == [3] and waits == [("cpu", False), ("meta", True), ("meta", False)]


def test_a_tensor_gets_to_a_device_where_there_is_no_pinned_memory(monkeypatch):
    def refuse(self):
        raise RuntimeError("out of locked pages")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert to_device(torch.zeros(3), "meta").shape == (3,)


def test_a_batch_on_a_device_knows_the_one_that_it_came_from():
    batch = batch_of([5, 6, 7], [8])
    assert batch.on_host() is batch
    moved = batch.to("meta")
    assert moved.input_ids.device.type == "meta" and moved.on_host() is batch
    assert moved.to("meta").on_host() is batch


def test_rows_of_a_batch_are_cut_to_the_longest_of_them():
    batch = batch_of([5, 6, 7, 8], [9], [3, 4])
    batch.kept = sets([[1], [2]], [], [[3, 4]])
    part = batch.rows(T([2, 1]))
    assert part.input_ids.tolist() == [[3, 4], [9, 0]]
    assert part.loss_mask.tolist() == part.attention_mask.tolist() == [[True, True], [True, False]]
    assert [row.tolist() for row in part.kept.ids] == [[3, 4], []] and part.position_ids is None
    assert batch.rows(T([], dtype=torch.long)).input_ids.shape == (0, 0)


def test_kept_sets_below_a_size_lose_words_and_no_token():
    found = sets([[1, 7], [9], [2, 3]], [], [[8, 0]]).below(8)
    assert [row.tolist() for row in found.ids] == [[1, 7, 2, 3], [], [0]]
    assert [row.tolist() for row in found.sizes] == [[2, 0, 2], [], [1]]
    assert sets([[1], [9]]).below(8).sizes[0].tolist() == [1, 0]


def test_kept_sets_are_counted_joined_picked_and_cut_into_chunks():
    both = sets([[1, 7], [9]]) + sets([[2, 3, 4]])
    assert len(both) == 2 and both.num_bytes() == 6 * 4 + 3 * 8  # words of four bytes, counts of eight
    assert [row.tolist() for row in both.rows(T([1, 0])).ids] == [[2, 3, 4], [1, 7, 9]]
    assert [(ids.tolist(), sizes.tolist()) for ids, sizes in both.chunks(2)] == [([1, 7, 9], [2, 1]), ([2, 3, 4], [3])]
    broken = KeptSets([T([1], dtype=torch.int32)], [T([1]), T([1])])
    with pytest.raises(ValueError, match="zip"):
        broken.below(8)


def test_rows_of_unequal_length_are_filled_up_on_the_right():
    assert pad_right([[1, 2], [], T([3])], 9).tolist() == [[1, 2], [9, 9], [3, 9]]
    assert pad_right([[1.5]], 0.0, torch.float32).tolist() == [[1.5]]
    assert pad_right([], 0).shape == (0, 0)


def test_lengths_as_a_mask():
    assert length_mask([2, 0]).tolist() == [[True, True], [False, False]]
    assert length_mask(T([1]), 3).tolist() == [[True, False, False]]
    assert length_mask([]).shape == (0, 0) and length_mask([], 2).shape == (0, 2)


def test_a_token_is_predicted_by_the_state_before_it_and_the_first_by_none():
    batch = batch_of([5, 6, 7], [8, 9])
    states = torch.arange(6).view(2, 3, 1)
    assert predicting(states, batch)[:, 0].tolist() == [0, 1, 3]
    assert predicted(batch).tolist() == [6, 7, 9]
    assert summed_by_row(T([1.0, 2.0, 4.0]), batch).tolist() == [3.0, 4.0]


def test_reductions_over_marked_places_never_see_the_others():
    values, mask = T([[1.0, math.nan], [2.0, 6.0]]), T([[True, False], [True, True]])
    assert float(masked_sum(values, mask)) == 9.0 and float(masked_mean(values, mask)) == 3.0
    assert float(masked_mean(values, ~mask & mask)) == 0.0
    assert last_true(T([[True, True, False], [False, False, False]])).tolist() == [1, -1]


def test_flat_values_go_back_to_their_places_in_their_own_dtype():
    found = scatter(T([1.0, 2.0], dtype=torch.float64), T([[False, True], [True, False]]))
    assert found.tolist() == [[0.0, 1.0], [2.0, 0.0]] and found.dtype == torch.float64


def test_rows_that_share_a_prefix_stand_together_within_the_budget():
    groups, lengths = T([1, 0, 1, 0]), T([3, 2, 4, 5])
    assert [g.tolist() for g in prefix_groups_within(groups, lengths, 12)] == [[1, 3], [0, 2]]
    assert [g.tolist() for g in prefix_groups_within(groups, lengths, 20)] == [[1, 3, 0, 2]]  # 4 x 5 is within
    assert [g.tolist() for g in prefix_groups_within(groups, lengths, 19)] == [[1, 3, 0], [2]]
    assert prefix_groups_within(groups[:0], lengths[:0], 9) == []


# -- metrics pool observations: a mean by its weights, a spread and extremes over all that was seen -------------------


def test_a_mean_is_divided_by_its_own_weight():
    metrics = Metrics().add("loss", 1.0, 3) + Metrics().add("loss", 5.0, 1)
    assert metrics.compute() == {"loss": 2.0}


def test_spreads_and_extremes_of_parts_are_those_of_the_whole():
    values = torch.tensor([3.0, -1.0, 4.0, 1e4, 5.0, 9.0, 2.0])
    total = Metrics()
    for part in (values[:3], values[3:3], values[3:4], values[4:]):
        metrics = Metrics()
        for kind in ("std", "min", "max"):
            metrics.add_spread(kind, part, kind)
        total += metrics
    assert total.compute() == pytest.approx({"std": float(values.double().std(correction=0)), "min": -1.0, "max": 1e4})


def test_a_spread_far_from_zero_does_not_cancel():
    values = torch.tensor([1e8, 1e8 + 8, 1e8 + 16], dtype=torch.float64)
    metrics = Metrics().add_spread("std", values[:1], "std") + Metrics().add_spread("std", values[1:], "std")
    assert metrics.compute()["std"] == pytest.approx((128 / 3) ** 0.5, rel=1e-9)


def test_what_nobody_observed_has_a_name_and_no_value():
    metrics = Metrics().add("loss", float("nan"), 0).add_spread("least", torch.zeros(0), "min")
    assert metrics.compute() == {}
    assert (metrics + Metrics().add("loss", 2.0)).compute() == {"loss": 2.0}


def test_one_name_has_one_meaning():
    with pytest.raises(ValueError, match="recorded as a mean"):
        Metrics().add("reward", 1.0).add_spread("reward", torch.ones(2), "max")
