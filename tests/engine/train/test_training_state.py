"""Training goes on bit for bit where its state was taken, and a gradient that is not finite changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.run import checkpoint
from tests.factories.tiny import optimizer_step

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


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each[2] == "adamw"], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
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
