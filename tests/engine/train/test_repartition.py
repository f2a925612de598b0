"""Parts of weights and moments that some processes saved, cut anew for another number of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import zero_state
from hybrid_rlhf.engine.train.ema import WeightAverage
from hybrid_rlhf.engine.train.repartition import Partition, Regrouped, spans
from hybrid_rlhf.engine.train.zero import gathered
from tests.factories.tiny import optimizer_step

SIZES = {"a": 5, "b": 3, "c": 2}  # numbers 1 to 5, 6 to 8, 9 and 10
WHOLE = {"a": [1, 2, 3, 4, 5], "b": [6, 7, 8], "c": [9, 10]}
GROUPS = [["b", "a"], ["c"]]
# by hand: (stage, processes) -> the parts of each process. -1 fills up, and must not get into a weight
BY_HAND = {
    (0, 2): [WHOLE, WHOLE],
    (2, 1): [{"group 0": [6, 7, 8, 1, 2, 3, 4, 5], "group 1": [9, 10]}],
    (1, 2): [{"group 0": [6, 7, 8, 1], "group 1": [9, 10]}, {"group 0": [2, 3, 4, 5], "group 1": [-1, -1]}],
    (2, 3): [{"group 0": [6, 7, 8, 1], "group 1": [9, 10]}, {"group 0": [2, 3, 4, 5], "group 1": [-1, -1]},
             {"group 0": [-1] * 4, "group 1": [-1, -1]}],
    (3, 1): [{"group 0": [6, 7, 8, 1, 2, 3, 4, 5], "group 1": [9, 10]}],
    (3, 2): [{"group 0": [6, 7, 1, 2, 3], "group 1": [9]}, {"group 0": [8, -1, 4, 5, -1], "group 1": [10]}],
    (3, 4): [{"group 0": [6, 1, 2], "group 1": [9]}, {"group 0": [7, 3, 4], "group 1": [10]},
             {"group 0": [8, 5, -1], "group 1": [-1]}, {"group 0": [-1, -1, -1], "group 1": [-1]}]}


def build(stage: int, dtype: str = "float32") -> HybridEngine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 1)).to(getattr(torch, dtype))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    return HybridEngine(module).prepare_training(config, lambda step: 1 / (1 + step), ZeroConfig(stage))


def train(engine: HybridEngine, steps: range) -> list[float]:
    """The norms of the gradients."""
    dtype = next(engine.module.parameters()).dtype
    rows = [torch.randn(6, 64, generator=torch.Generator().manual_seed(step)).to(dtype) for step in steps]
    return [optimizer_step(engine, list(x.split([2, 4])), lambda piece: (engine(piece).float() ** 2).sum())
            for x in rows]


def weights(engine: HybridEngine) -> list[Tensor]:
    with gathered(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


def placed(stage: int, parts: list[dict]) -> list:
    return spans(Partition(stage, GROUPS if stage else []), SIZES, len(parts),
                 {name: len(part) for name, part in parts[0].items()})


@pytest.mark.parametrize("after", BY_HAND, ids=str)
@pytest.mark.parametrize("before", BY_HAND, ids=str)
def test_parts_of_any_layout_become_those_of_any_other(before, after):
    saved, wanted = BY_HAND[before], BY_HAND[after]
    for rank, own in enumerate(wanted):
        here = 0 if after[0] == 0 else rank
        parts = Regrouped(placed(before[0], saved), [s for s in placed(after[0], wanted) if s.rank == here])
        for name, numbers in own.items():
            found = parts.tensor(name, len(numbers), lambda r, part: torch.tensor(saved[r][part], dtype=torch.float32))
            assert found.tolist() == [max(0, number) for number in numbers]


def test_what_was_never_stepped_has_moments_of_0():
    parts = Regrouped(placed(0, BY_HAND[0, 2]), placed(2, BY_HAND[2, 1]))
    found = parts.tensor("group 0", 8, lambda _, part: torch.ones(5) if part == "a" else None)
    assert found.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


def test_parts_that_are_too_long_or_too_short_are_refused():
    for stage, length in ((1, 3), (1, 9), (3, 4), (3, 6)):
        with pytest.raises(ValueError, match="do not have the weights that are trained here"):
            spans(Partition(stage, GROUPS), SIZES, 2, {"group 0": length, "group 1": 2 if stage == 1 else 1})
    with pytest.raises(ValueError, match="of other weights"):
        spans(Partition(1, [["a", "b"]]), SIZES, 1, {"group 0": 8})


def as_of(flat_of: dict[str, Tensor], stage: int, world: int, group: list[str]) -> list[Tensor]:
    """The parts of a group by the definition of ZeRO, independently: with torch's pad, cat and chunk."""
    rows = [flat_of[name].flatten() for name in group]
    if stage == 3:
        pieces = [torch.nn.functional.pad(row, (0, -len(row) % world)).chunk(world) for row in rows]
        return [torch.cat([piece[r] for piece in pieces]) for r in range(world)]
    row = torch.cat(rows)
    return list(torch.nn.functional.pad(row, (0, -len(row) % (2 * world))).chunk(world))


def saved_by(engine: HybridEngine, average: WeightAverage, stage: int, world: int) -> tuple[list[dict], list[dict]]:
    """What `world` processes at ZeRO `stage` would have saved of a trained engine and its average."""
    whole, plain = engine.training.state(), engine.training.shard()
    groups = [[n for n, p in engine.training.parameters.items() if (p.dim() > 1) == is_matrix] for is_matrix in (1, 0)]
    means, states, averages = average.weights(), [], []
    for rank in range(world):
        own = plain | {"partition": {"stage": stage, "groups": groups}, "weights": {}, "optimizer": {}}
        mean = {}
        for i, group in enumerate(groups):
            cut = {key: as_of(of, stage, world, group)[rank] for key, of in
                   {**{k: whole[k] for k in ("weights", "exp_avg", "exp_avg_sq")}, "mean": means}.items()}
            mean[f"group {i}"] = cut.pop("mean")
            own["weights"][f"group {i}"] = cut.pop("weights")
            own["optimizer"][f"group {i}"] = {"step": torch.tensor(3.0), **cut}
        states.append(own)
        averages.append({"averages": mean, "partition": own["partition"]})
    return states, averages


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("now", range(4))
@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 4)])
def test_one_process_goes_on_where_several_were(stage, world, now, dtype):
    """With bfloat16, one process at ZeRO 0 has its own masters, whose step's rounding of a gradient is another one."""
    straight = build(0, dtype)
    average = WeightAverage(straight, 0.5)
    train(straight, range(3))
    average.update()
    states, averages = saved_by(straight, average, stage, world)
    resumed = build(now, dtype)
    again = WeightAverage(resumed, 0.5)
    resumed.training.load_shard({"processes": states})
    again.load_state({"processes": averages})
    ours, theirs, means = resumed.training.state(), straight.training.state(), (again.weights(), average.weights())
    for key in ("weights", "exp_avg", "exp_avg_sq"):
        assert all(torch.equal(ours[key][name], value) for name, value in theirs[key].items())
    assert all(torch.equal(means[0][name], value) for name, value in means[1].items())
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
    assert (resumed.training.num_steps, resumed.training.learning_rate) == (3, straight.training.learning_rate)
    close = {"rel": 1e-5} if dtype == "float32" else {"rel": 2e-2}
    assert train(resumed, range(3, 6)) == pytest.approx(train(straight, range(3, 6)), **close)


def test_what_one_process_saved_is_cut_for_two(monkeypatch):
    """The second of two at ZeRO 1: only its own parts are made."""
    engine = build(0, "bfloat16")
    train(engine, range(2))
    saved, other = engine.training.shard(), build(1, "bfloat16").training
    monkeypatch.setattr(zero_state, "world_size", lambda: 2)
    monkeypatch.setattr(zero_state, "rank", lambda: 1)
    whole = engine.training.state()
    stepped = {name: part[:-(-len(part) // 4) * 2] for name, part in zero_state._stepped(other).items()}
    found = {name: (own, weight) for name, own, weight in zero_state._cut_anew(other, [saved], stepped)}
    for i, group in enumerate(zero_state.partition(other).groups):
        own, weight = found[f"group {i}"]
        assert torch.equal(weight, as_of(whole["weights"], 1, 2, group)[1])
        assert torch.equal(own["exp_avg_sq"], as_of(whole["exp_avg_sq"], 1, 2, group)[1])
        assert torch.equal(own["step"], torch.tensor(2.0))  # as torch's own AdamW counts


def test_eight_bit_moments_in_parts_are_refused():
    groups = [["0.weight", "3.weight"], ["0.bias", "2.weight", "2.bias", "3.bias"]]
    states = [{"partition": {"stage": 1, "groups": groups}, "num_steps": 1, "skipped": [0, 0],
               "weights": {"group 0": torch.zeros(6240), "group 1": torch.zeros(290)},
               "optimizer": {"group 0": {"step": 1, "state1": torch.zeros(6240, dtype=torch.uint8)}, "group 1": {}}}]
    with pytest.raises(ValueError, match="optimizer's state1 cannot be cut"):
        build(1).training.load_shard({"processes": states})
