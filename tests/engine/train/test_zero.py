"""Training through DeepSpeed gives the weights that plain torch gives."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import Tensor, nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import barrier
from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import zero_state
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.engine.train.ema import WeightAverage
from hybrid_rlhf.engine.train.repartition import Partition, Regrouped, spans
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.run import checkpoint
from tests.factories.tiny import optimizer_step


def _pair(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))
    return module, copy.deepcopy(module)


def _engine(module: nn.Module, stage: int | None, **optimizer) -> HybridEngine:
    settings = OptimizerConfig(learning_rate=1e-2, **optimizer)
    return HybridEngine(module).prepare_training(settings, lambda step: 1.0 / (1 + step), ZeroConfig(stage))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pieces", [[12], [3, 4, 5]])
def test_weights_after_three_steps_equal_plain_torch_for_every_stage_and_any_split(stage, pieces):
    module, twin = _pair()
    engine = _engine(module, stage, weight_decay=0.1, max_grad_norm=0.3)
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    plain = [p for p in twin.parameters() if p.ndim <= 1]
    oracle = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=1)
    for step in range(3):
        x, y = torch.randn(12, 6), torch.randn(12, 1) * 5
        norm = optimizer_step(engine, list(zip(x.split(pieces), y.split(pieces), strict=True)),
                             lambda piece: ((engine(piece[0]) - piece[1]) ** 2).sum() / 12)
        oracle.zero_grad()
        ((twin(x) - y) ** 2).mean().backward()
        expected = nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
        for group in oracle.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        oracle.step()
        assert norm == pytest.approx(float(expected), rel=1e-5)
        assert norm > 0.3  # or clipping was not put to the test
    with gathered(module):
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("optim", "stage"), [("adamw", 0), ("sgd", 1)])
def test_bfloat16_weights_take_no_step_at_start(optim, stage):
    module, _ = _pair()
    module.to(torch.bfloat16)
    before = [p.detach().clone() for p in module.parameters()]
    engine = _engine(module, None, weight_decay=0.5, optim=optim)
    assert engine.training.stage == stage
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(old, new)


def test_sixteen_bit_weights_at_stage_0_are_refused_where_we_keep_no_masters(monkeypatch):
    for dtype, optim in ((torch.float16, "adamw"), (torch.bfloat16, "sgd")):
        with pytest.raises(UserError, match="zero_stage 1"):
            _engine(_pair()[0].to(dtype), 0, optim=optim)
    monkeypatch.setattr("hybrid_rlhf.engine.train.zero_config.world_size", lambda: 2)
    assert ZeroConfig().stage(torch.bfloat16) == 1
    with pytest.raises(UserError, match="2 process"):
        ZeroConfig(0).stage(torch.bfloat16)


@pytest.mark.parametrize("stage", [0, 1])
def test_frozen_weights_get_no_gradient_and_do_not_move(stage):
    module, _ = _pair()
    module[0].weight.requires_grad_(False)
    before = module[0].weight.detach().clone()
    engine = _engine(module, stage, weight_decay=0.5)
    optimizer_step(engine, [torch.randn(4, 6)], lambda x: engine(x).sum())
    assert torch.equal(module[0].weight, before) and module[0].weight.grad is None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_state_holds_weights_and_moments_by_parameter(stage):
    module, _ = _pair()
    engine = _engine(module, stage)
    optimizer_step(engine, [torch.randn(4, 6)], lambda x: engine(x).sum())
    state = engine.training.state()
    names = {n for n, _ in module.named_parameters()}
    assert state["num_steps"] == 1
    assert set(state["weights"]) == set(state["exp_avg"]) == set(state["exp_avg_sq"]) == {f"{n}" for n in names}
    with gathered(module):
        assert all(torch.equal(state["weights"][name], parameter) for name, parameter in module.named_parameters())
    for name in names:
        assert state["exp_avg"][name].shape == state["weights"][name].shape
        assert state["exp_avg"][name].abs().sum() > 0


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_variable_of_a_launcher_is_left_for_programs_started_later(monkeypatch, stage):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    module, _ = _pair()
    _engine(module, stage)
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & os.environ.keys()


def test_one_process_starts_no_library_for_talking_to_others(monkeypatch):
    """NCCL starts at the first collective of a card's tensors and takes half a GiB of it."""
    names = [n for n in dir(torch.distributed) if n.startswith(("all_", "barrier", "broadcast", "gather", "reduce"))]
    for name in names:
        monkeypatch.setattr(torch.distributed, name, lambda *_inputs, name=name, **_named: pytest.fail(name))
    module, _ = _pair()
    engine = _engine(module, None)
    before = [p.clone() for p in module.parameters()]
    optimizer_step(engine, [torch.ones(2, 6)], lambda x: engine(x).sum())
    assert not all(map(torch.equal, before, module.parameters()))
    barrier()


# -- training goes on bit for bit where its state was taken, and a gradient that is not finite changes nothing --------


# stage, dtype, optimizer, offload
LAYOUTS = [(0, "float32", "adamw", []), (0, "float32", "adamw_unfused", []), (0, "float32", "sgd", []),
           (0, "bfloat16", "adamw", []), (0, "float32", "adamw_8bit", []), (1, "float32", "adamw", []),
           (1, "bfloat16", "adamw", ["optimizer"]), (2, "bfloat16", "adamw", []), (3, "float32", "adamw", []),
           (3, "bfloat16", "adamw", [])]


def build(stage=0, dtype="float32", optim="adamw", offload=(), **settings) -> HybridEngine:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 1)).to(getattr(torch, dtype))
    config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, optim=optim, **settings)
    return HybridEngine(module).prepare_training(config, lambda step: 1 / (1 + step), ZeroConfig(stage, list(offload)))


def train(engine: HybridEngine, steps, factor: float = 1.0) -> list[float]:
    dtype = next(engine.module.parameters()).dtype
    norms = []
    for step in steps:
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        norms.append(optimizer_step(
            engine, list(x.split([2, 4])), lambda piece: (engine(piece).float() ** 2).sum() * factor))
    return norms


def weights(engine: HybridEngine) -> list[torch.Tensor]:
    with gathered(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_engine_that_takes_up_a_saved_state_goes_on_bit_for_bit(layout, tmp_path):
    """Against the one that never stopped; at a step in the middle, with bias correction and schedule under way."""
    straight = build(*layout)
    train(straight, range(3))
    path = checkpoint.save(tmp_path, 3, straight.training.shard())
    expected = train(straight, range(3, 6))
    resumed = build(*layout)
    with torch.no_grad():
        for parameter in resumed.module.parameters():  # nothing of a fresh start is left
            parameter.add_(1.0) if layout[0] == 0 else None
    resumed.training.load_shard(checkpoint.read(path))
    assert train(resumed, range(3, 6)) == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
    assert not torch.equal(weights(resumed)[0], weights(build(*layout))[0])


def test_the_state_of_other_weights_is_refused(tmp_path):
    path = checkpoint.save(tmp_path, 0, build().training.shard())
    other = HybridEngine(nn.Sequential(nn.Linear(64, 5)))
    other.prepare_training(OptimizerConfig(), lambda _: 1.0, ZeroConfig(0))
    with pytest.raises(ValueError, match="of other weights"):
        other.training.load_shard(checkpoint.read(path))


@pytest.mark.parametrize(("layout", "bad"), [(each, float(("nan", "inf")[i % 2])) for i, each in enumerate(LAYOUTS)
                                             if each[2] == "adamw"], ids=str)
def test_a_gradient_that_is_not_finite_changes_no_weight_and_no_moment(layout, bad):
    engine, twin = build(*layout), build(*layout)
    for each in (engine, twin):
        train(each, range(2))
    before = copy.deepcopy(engine.training.shard()), weights(engine)
    train(engine, [2], factor=bad)
    after = engine.training.shard()
    assert (engine.training.num_skipped, engine.training.num_skipped_in_a_row) == (1, 1)
    assert all(torch.equal(a, b) for a, b in zip(before[1], weights(engine), strict=True))
    for name, own in before[0]["optimizer"].items():
        assert own.keys() == after["optimizer"][name].keys()
        for key, value in own.items():
            same = torch.equal(value, after["optimizer"][name][key]) if isinstance(value, torch.Tensor) else (
                value == after["optimizer"][name][key])
            assert same, (name, key)
    twin.training.num_steps += 1  # the schedule counts the update that was not made
    assert train(engine, [3]) == train(twin, [3])
    assert all(torch.equal(a, b) for a, b in zip(weights(engine), weights(twin), strict=True))
    assert engine.training.num_skipped_in_a_row == 0


def test_skipped_updates_are_counted_and_too_many_in_a_row_end_the_run():
    engine = build(max_skipped_updates=2)
    factors = iter([1.0, float("nan"), 1.0, float("nan"), float("nan")])

    def update() -> dict:
        factor = next(factors)
        x = torch.randn(4, 64)
        rows = Rows(torch.ones(4), lambda index: ((engine(x[index]) ** 2).sum() * factor, {}))
        return accumulate(engine, 100, rows).compute()

    found = [update() for _ in range(4)]
    assert [f["train/skipped_updates"] for f in found] == [0, 1, 1, 2]
    assert ["grad_norm" in f for f in found] == [True, False, True, False]
    with pytest.raises(NotFinite, match=r"2 updates in a row; lower train\.learning_rate"):
        update()
    engine.name, factors = "critic", iter([float("nan")])
    with pytest.raises(NotFinite, match=r"the critic's .*; lower roles\.critic\.learning_rate.*ppo\.score_clip"):
        update()


# -- parts of weights and moments that some processes saved, cut anew for another number of them ----------------------


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
