"""float16: an overflow lowers the loss scale and changes nothing else, and at 1 the run ends. Of whole models the scale
and the step are DeepSpeed's; of fp32 adapters, whose gradients pass float16 layers, the scale is ours.

A CPU without products in float16 is refused by DeepSpeed, and so by our settings; torch computes them all the same,
slowly, which is enough for here: of DeepSpeed only that refusal is taken away.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import optimizers
from hybrid_rlhf.engine.train.optimizers import LossScale
from hybrid_rlhf.engine.train.zero import gathered
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.run import checkpoint
from hybrid_rlhf.training import builders
from tests.factories.adapters import base_with
from tests.factories.tiny import optimizer_step, save_tiny

pytestmark = pytest.mark.usefixtures("float16_on_any_device")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FIRST = 2.0**16  # DeepSpeed's own first scale, and ours
SMALL = 1e-7  # a loss whose gradients float16 rounds to 0
WHOLE, ADAPTERS = [("whole", stage) for stage in (1, 2, 3)], [("adapters", stage) for stage in (0, 1, 2, 3)]
ADAPTED_STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


@pytest.fixture
def float16_on_any_device(monkeypatch):
    whole(0, torch.float32)  # DeepSpeed has chosen its accelerator by now
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)


def fresh(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 1)).to(DEVICE, dtype)


def whole(stage: int, dtype: torch.dtype = torch.float16) -> HybridEngine:
    config = OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e6)
    return HybridEngine(fresh(dtype)).prepare_training(config, lambda _step: 1.0, ZeroConfig(stage))


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(DEVICE, torch.float16)


def train_whole(engine: HybridEngine, step: int, factor: float = 1e-3) -> float:
    return optimizer_step(engine, [rows(step)], lambda x: (engine(x).float() ** 2).sum() * factor)


def model(dtype: torch.dtype = torch.float16) -> nn.Module:
    module = base_with("default")
    for parameter in module.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(dtype)
    module.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.float())
    return module


def adapted(stage: int = 0, dtype: torch.dtype = torch.float16, **changes) -> HybridEngine:
    settings = OptimizerConfig(**{"learning_rate": 3e-3, "max_grad_norm": 1e6, "adam_epsilon": 1e-20} | changes)
    return HybridEngine(model(dtype), name="actor").prepare_training(settings, lambda _step: 1.0, ZeroConfig(stage))


def token_rows(step: int) -> torch.Tensor:
    return torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(step))


def loss(engine: HybridEngine, ids: torch.Tensor) -> torch.Tensor:
    logits = engine(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train_adapted(engine: HybridEngine, step: int, factor: float = SMALL) -> float:
    return optimizer_step(engine, token_rows(step).split(1), lambda ids: loss(engine, ids) * factor)


def weights(engine: HybridEngine) -> list[torch.Tensor]:
    with gathered(engine.module):
        return [p.detach().clone() for p in engine.module.parameters() if p.requires_grad]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


BUILDS, TRAINS = {"whole": whole, "adapters": adapted}, {"whole": train_whole, "adapters": train_adapted}
BEYOND = {"whole": 40.0, "adapters": 60.0}  # factors: times 65,536 gradients are beyond 65,504 somewhere on the way


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_are_those_of_float32_masters_under_gradients_in_float16(stage):
    """Plain torch as the oracle: gradients of the float16 module, unscaled, to AdamW on float32 copies."""
    engine, plain = whole(stage), fresh()
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.0)
    for step in range(4):
        norm = train_whole(engine, step)
        plain.zero_grad()
        ((plain(rows(step)).float() ** 2).sum() * 1e-3 * FIRST).backward()
        for master, parameter in zip(masters, plain.parameters(), strict=True):
            master.grad = parameter.grad.float() / FIRST
        assert norm == pytest.approx(float(torch.cat([m.grad.flatten() for m in masters]).norm()), rel=1e-3)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, plain.parameters(), strict=True):
                parameter.copy_(master)
    assert (engine.training.loss_scale, engine.training.num_skipped) == (FIRST, 0)
    for ours, theirs in zip(weights(engine), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("kind", "stage"), WHOLE + ADAPTERS)
def test_an_overflow_skips_the_update_is_said_and_lowers_the_scale_until_gradients_fit(kind, stage, caplog):
    engine, train = BUILDS[kind](stage), TRAINS[kind]
    train(engine, 0)
    before, seen = weights(engine), []
    with caplog.at_level(logging.WARNING):
        while True:
            train(engine, 1, BEYOND[kind])
            seen.append((engine.training.loss_scale, engine.training.num_skipped))
            if not engine.training.num_skipped_in_a_row:
                break
            assert equal(before, weights(engine))
    scales = [FIRST, *(scale for scale, _ in seen)]
    assert scales[-1] < FIRST and scales[-1] == scales[-2]
    # DeepSpeed forgives one
    assert all(a / b in ((2.0,) if kind == "adapters" else (1.0, 2.0)) for a, b in pairwise(scales[:-1]))
    assert [n for _, n in seen] == [*range(1, len(seen)), len(seen) - 1]
    assert not equal(before, weights(engine)) and all(w.isfinite().all() for w in weights(engine))
    lines = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(lines) == len(seen) - 1
    assert f"update 2 is skipped, 1 in a row; the loss scale of float16 is now {seen[0][0]:g}" in lines[0]


@pytest.mark.parametrize(("kind", "stage"), [*WHOLE, ("adapters", 0)])
def test_at_the_lowest_scale_the_run_ends_with_one_line(kind, stage):
    engine, train, scales = BUILDS[kind](stage), TRAINS[kind], []
    before = weights(engine)
    while not scales or scales[-1] > 1:
        train(engine, 0, float("inf"))
        scales.append(engine.training.loss_scale)
    with pytest.raises(NotFinite, match=r"even at the smallest loss scale, 1; lower train\.learning_rate") as error:
        train(engine, 0, float("inf"))
    assert "\n" not in str(error.value)
    assert scales[-1] == 1.0 and scales == sorted(scales, reverse=True)
    assert len(scales) < OptimizerConfig().max_skipped_updates  # else their count would end the run before
    assert equal(before, weights(engine))


@pytest.mark.parametrize(("kind", "stage"), WHOLE + ADAPTERS)
def test_the_scale_goes_on_where_it_was(kind, stage, tmp_path):
    straight, train = BUILDS[kind](stage), TRAINS[kind]
    train(straight, 0)
    for _ in range(5):
        train(straight, 1, float("inf"))
    assert 1.0 < straight.training.loss_scale < FIRST
    path = checkpoint.save(tmp_path, 6, straight.training.shard())
    resumed = BUILDS[kind](stage)
    resumed.training.load_shard(checkpoint.read(path))
    assert resumed.training.shard()["loss_scale"] == straight.training.shard()["loss_scale"]
    assert (resumed.training.loss_scale, resumed.training.num_skipped) == (straight.training.loss_scale, 5)
    for each in (straight, resumed):
        train(each, 2, float("inf"))
    assert straight.training.loss_scale == resumed.training.loss_scale
    assert train(straight, 3) == train(resumed, 3)
    assert equal(weights(straight), weights(resumed))


@ADAPTED_STAGES
def test_it_learns_from_gradients_that_float16_rounds_to_nothing(stage):
    engine, losses = adapted(stage, learning_rate=1e-2), []
    for _ in range(12):
        losses.append(float(loss(engine, token_rows(0)).detach()))
        train_adapted(engine, 0)
    assert losses[-1] < losses[0] - 0.2


def test_the_same_run_without_a_scale_learns_nothing(monkeypatch):
    """What the test above is about: the factor alone makes the difference."""
    monkeypatch.setattr(optimizers, "FIRST", 1.0)
    engine, losses = adapted(learning_rate=1e-2), []
    for _ in range(12):
        losses.append(float(loss(engine, token_rows(0)).detach()))
        assert train_adapted(engine, 0) == 0.0
    assert losses[-1] == losses[0]


@ADAPTED_STAGES
def test_norm_and_step_are_those_of_float32(stage):
    """The same weights and the same loss all in float32, by plain torch; clipping included, so unscaled before it."""
    engine, plain = adapted(stage, max_grad_norm=1e-7), model(torch.float32)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=1e-20, weight_decay=0.0)
    before = [p.detach().clone() for p in trained]
    norm = train_adapted(engine, 0)
    for ids in token_rows(0).split(1):
        logits = plain(input_ids=ids, use_cache=False).logits
        (nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) * SMALL).backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(trained, 1e-7)), rel=5e-3)
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    moments = engine.training.state()["exp_avg"]
    for name, moment in moments.items():
        theirs = 0.1 * gradients[name]
        assert float((moment - theirs).norm()) < 0.02 * float(theirs.norm()), name
    optimizer.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip(weights(engine), before, strict=True)])
    wanted = torch.cat([(a.detach() - b).flatten() for a, b in zip(trained, before, strict=True)])
    assert float(torch.cosine_similarity(moved, wanted, 0)) > 0.97  # Adam's first step: the signs


def test_the_scale_doubles_after_a_thousand_good_updates_in_a_row():
    scale = LossScale()
    for is_finite in [*[True] * 999, False, *[True] * 999]:
        scale.update(is_finite=is_finite)
    assert scale.value == FIRST / 2
    scale.update(is_finite=True)
    assert scale.value == FIRST


def test_a_scalar_head_beside_adapters_is_of_their_dtype(tmp_path, monkeypatch):
    """In float16 it would be stepped in float16, without a master."""
    monkeypatch.setattr(builders, "check_dtype", lambda _model: None)  # which refuses float16 on a CPU
    folder = save_tiny(tmp_path / "model")
    config = ModelConfig(model_name_or_path=folder, dtype="float16", lora=LoraConfig(r=2))
    scalar = builders.open_scalar(config, load_tokenizer(folder))
    trained = {n: p.dtype for n, p in scalar.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32} and "score.weight" in trained
    assert scalar.dtype == torch.float16
