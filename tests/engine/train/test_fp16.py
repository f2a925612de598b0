"""float16 through DeepSpeed's loss scale: an overflow lowers it and changes nothing else, and at 1 the run ends.

A CPU without products in float16 is refused by DeepSpeed, and so by our settings; torch computes them all the same,
slowly, which is enough for here: of DeepSpeed only that refusal is taken away; its scale and its step are real.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.run import checkpoint
from tests.factories.tiny import optimizer_step

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST = 2.0**16  # DeepSpeed's own first scale


@pytest.fixture(autouse=True)
def _float16_on_any_device(monkeypatch):
    build(0, torch.float32)  # DeepSpeed has chosen its accelerator by now
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


def fresh(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1)).to(DEVICE, dtype)


def build(stage: int, dtype: torch.dtype = torch.float16) -> HybridEngine:
    config = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e6)
    return HybridEngine(fresh(dtype)).prepare_training(config, lambda _step: 1.0, ZeroConfig(stage))


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE, torch.float16)


def train(engine: HybridEngine, step: int, factor: float = 1e-3) -> float:
    return optimizer_step(engine, [rows(step)], lambda x: (engine(x).float() ** 2).sum() * factor)


def scale(engine: HybridEngine) -> float:
    return float(engine.training.engine.optimizer.loss_scaler.cur_scale)


def weights(engine: HybridEngine) -> list[torch.Tensor]:
    with gathered(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


@STAGES
def test_steps_are_those_of_float32_masters_under_gradients_in_float16(stage):
    """Plain torch as the oracle: gradients of the float16 module, unscaled, to AdamW on float32 copies."""
    engine, plain = build(stage), fresh()
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        norm = train(engine, step)
        plain.zero_grad()
        ((plain(rows(step)).float() ** 2).sum() * 1e-3 * FIRST).backward()
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            master.grad = parameter.grad.float() / FIRST
        assert norm == pytest.approx(float(torch.cat([m.grad.flatten() for m in masters]).norm()), rel=1e-3)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
    assert (scale(engine), engine.training.num_skipped) == (FIRST, 0)
    for ours, theirs in zip(weights(engine), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-3, atol=2e-3)


@STAGES
def test_an_overflow_skips_the_update_is_counted_and_lowers_the_scale_until_gradients_fit(stage):
    engine = build(stage)
    train(engine, 0)
    before, seen = weights(engine), []
    while True:
        train(engine, 1, factor=40.0)  # times 65,536 its gradients are beyond 65,504
        seen.append((scale(engine), engine.training.num_skipped))
        if engine.training.num_skipped_in_a_row == 0:
            break
        assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    scales = [s for s, _ in seen]
    assert scales[-1] < FIRST and all(a / b in (1.0, 2.0) for a, b in zip([FIRST, *scales], scales, strict=False))
    assert [n for _, n in seen] == [*range(1, len(seen)), len(seen) - 1]
    assert not all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    assert all(w.isfinite().all() for w in weights(engine))


@STAGES
def test_at_the_lowest_scale_the_run_ends_with_one_line(stage):
    engine, scales = build(stage), []
    before = weights(engine)
    while not scales or scales[-1] > 1:
        train(engine, 0, factor=float("inf"))
        scales.append(scale(engine))
    with pytest.raises(NotFinite, match=r"even at the smallest loss scale, 1; lower train\.learning_rate") as error:
        train(engine, 0, factor=float("inf"))
    assert "\n" not in str(error.value)
    assert scales[-1] == 1.0 and scales == sorted(scales, reverse=True)
    assert len(scales) < OptimizerConfig().max_skipped_updates  # else their count would end the run before
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))


@STAGES
def test_the_scale_goes_on_where_it_was(stage, tmp_path):
    straight = build(stage)
    train(straight, 0)
    for _ in range(5):
        train(straight, 1, factor=float("inf"))
    assert 1.0 < scale(straight) < FIRST
    path = checkpoint.save(tmp_path, 6, straight.training.shard())
    resumed = build(stage)
    resumed.training.load_shard(checkpoint.read(path))
    assert (scale(resumed), resumed.training.num_skipped) == (scale(straight), 5)
    for each in (straight, resumed):
        train(each, 2, factor=float("inf"))
    assert scale(straight) == scale(resumed)
    assert train(straight, 3) == train(resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))
