"""fp32 adapters in a float16 model: gradients pass float16 layers, so the loss is scaled, here and not by DeepSpeed."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

from hybrid_rlhf.core.errors import NotFinite
from hybrid_rlhf.engine import HybridEngine, OptimizerConfig, ZeroConfig
from hybrid_rlhf.engine.train import optimizers
from hybrid_rlhf.engine.train.accumulate import Rows, accumulate
from hybrid_rlhf.engine.train.optimizers import LossScale
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.models.lora import LoraConfig
from hybrid_rlhf.models.tokenizer import load_tokenizer
from hybrid_rlhf.run import checkpoint
from hybrid_rlhf.training import builders
from tests.factories.adapters import base_with
from tests.factories.tiny import optimizer_step, save_tiny

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
FIRST = 2.0**16
SMALL = 1e-7  # a loss whose gradients float16 rounds to 0


def model(dtype: torch.dtype = torch.float16) -> nn.Module:
    module = base_with("default")
    for parameter in module.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(dtype)
    module.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.float())
    return module


def build(stage: int = 0, dtype: torch.dtype = torch.float16, **changes) -> HybridEngine:
    settings = OptimizerConfig(**{"learning_rate": 3e-3, "max_grad_norm": 1e6, "adam_epsilon": 1e-20} | changes)
    return HybridEngine(model(dtype), name="actor").prepare_training(settings, lambda _step: 1.0, ZeroConfig(stage))


def rows(step: int) -> torch.Tensor:
    return torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(step))


def loss(engine: HybridEngine, ids: torch.Tensor) -> torch.Tensor:
    logits = engine(input_ids=ids, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train(engine: HybridEngine, step: int, factor: float = SMALL) -> float:
    return optimizer_step(engine, rows(step).split(1), lambda ids: loss(engine, ids) * factor)


def weights(engine: HybridEngine) -> list[torch.Tensor]:
    return list(engine.training.state()["weights"].values())


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@STAGES
def test_it_learns_from_gradients_that_float16_rounds_to_nothing(stage):
    engine, losses = build(stage, learning_rate=1e-2), []
    for _ in range(12):
        losses.append(float(loss(engine, rows(0)).detach()))
        train(engine, 0)
    assert losses[-1] < losses[0] - 0.2


def test_the_same_run_without_a_scale_learns_nothing(monkeypatch):
    """What the test above is about: the factor alone makes the difference."""
    monkeypatch.setattr(optimizers, "FIRST", 1.0)
    engine, losses = build(learning_rate=1e-2), []
    for _ in range(12):
        losses.append(float(loss(engine, rows(0)).detach()))
        assert train(engine, 0) == 0.0
    assert losses[-1] == losses[0]


@STAGES
def test_norm_and_step_are_those_of_float32(stage):
    """The same weights and the same loss all in float32, by plain torch; clipping included, so unscaled before it."""
    engine, plain = build(stage, max_grad_norm=1e-7), model(torch.float32)
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, eps=1e-20, weight_decay=0.0)
    before = [p.detach().clone() for p in trained]
    norm = train(engine, 0)
    for ids in rows(0).split(1):
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


@STAGES
def test_an_overflow_changes_nothing_halves_the_scale_and_is_said(stage, caplog):
    engine = build(stage)
    train(engine, 0)
    before, seen = weights(engine), []
    with caplog.at_level(logging.WARNING):
        while True:
            train(engine, 1, factor=60.0)  # times 65,536 and more than 65,504 somewhere on the way
            seen.append(engine.training.loss_scale)
            if not engine.training.num_skipped_in_a_row:
                break
            assert equal(before, weights(engine))
    assert seen[0] == FIRST / 2 and seen[-1] == seen[-2] and len(seen) == engine.training.num_skipped + 1
    assert all(b == a / 2 for a, b in pairwise(seen[:-1]))
    assert not equal(before, weights(engine)) and all(w.isfinite().all() for w in weights(engine))
    lines = [r.getMessage() for r in caplog.records if "is skipped" in r.getMessage()]
    assert len(lines) == len(seen) - 1
    assert "update 2 is skipped, 1 in a row; the loss scale of float16 is now 32768" in lines[0]


def test_scale_and_skipped_updates_are_metrics():
    engine = build()
    ids = Rows(torch.ones(1, dtype=torch.long), lambda _: (loss(engine, rows(0)) * float("inf"), {}))
    found = accumulate(engine, 1, ids).compute()
    assert (found["train/loss_scale"], found["train/skipped_updates"]) == (FIRST / 2, 1.0)


def test_a_float32_model_has_no_scale_and_no_metric():
    engine = build(dtype=torch.float32)
    ids = Rows(torch.ones(1, dtype=torch.long), lambda _: (loss(engine, rows(0)), {}))
    assert engine.training.loss_scale is None and "train/loss_scale" not in accumulate(engine, 1, ids).compute()


def test_at_the_lowest_scale_the_run_ends_with_one_line():
    engine = build()
    before = weights(engine)
    for _ in range(16):
        train(engine, 0, factor=float("inf"))
    assert engine.training.loss_scale == 1.0
    with pytest.raises(NotFinite, match=r"even at the smallest loss scale, 1; lower train\.learning_rate"):
        train(engine, 0, factor=float("inf"))
    assert equal(before, weights(engine))


def test_the_scale_doubles_after_a_thousand_good_updates_in_a_row():
    scale = LossScale()
    for is_finite in [*[True] * 999, False, *[True] * 999]:
        scale.update(is_finite=is_finite)
    assert scale.value == FIRST / 2
    scale.update(is_finite=True)
    assert scale.value == FIRST


@STAGES
def test_a_resumed_run_goes_on_bit_by_bit(stage, tmp_path):
    straight = build(stage)
    train(straight, 0)
    for _ in range(3):
        train(straight, 1, factor=float("inf"))
    path = checkpoint.save(tmp_path, 4, straight.training.shard())
    resumed = build(stage)
    resumed.training.load_shard(checkpoint.read(path))
    assert resumed.training.loss_scale == straight.training.loss_scale == FIRST / 8
    assert resumed.training.scale.state() == straight.training.scale.state() == {"value": FIRST / 8, "num_good": 0}
    for factor in (SMALL, float("inf"), SMALL):
        ours, theirs = train(resumed, 2, factor), train(straight, 2, factor)
        assert ours == theirs or factor == float("inf")
    assert equal(weights(straight), weights(resumed))


def test_a_scalar_head_beside_adapters_is_of_their_dtype(tmp_path, monkeypatch):
    """In float16 it would be stepped in float16, without a master."""
    monkeypatch.setattr(builders, "check_dtype", lambda _model: None)  # which refuses float16 on a CPU
    folder = save_tiny(tmp_path / "model")
    config = ModelConfig(model_name_or_path=folder, dtype="float16", lora=LoraConfig(r=2))
    scalar = builders.open_scalar(config, load_tokenizer(folder))
    trained = {n: p.dtype for n, p in scalar.named_parameters() if p.requires_grad}
    assert set(trained.values()) == {torch.float32} and "score.weight" in trained
    assert scalar.dtype == torch.float16
