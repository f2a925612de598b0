"""Training through DeepSpeed gives the weights that plain torch gives."""

import copy
import os

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.distributed import barrier
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
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
