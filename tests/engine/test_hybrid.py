"""inference() is the only switch: it changes no weight, restores every mode, and sampling does what it was told."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.device_memory import PeakMeter, peak_in
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14]]


def _engine(**changes):
    return HybridEngine.for_inference(tiny_causal_lm(**changes), tiny_tokenizer())


def test_an_exception_inside_restores_every_mode_and_weight():
    engine = _engine()
    engine.module.train()
    engine.model.model.layers[1].eval()
    engine.model.gradient_checkpointing_enable()
    before = {n: p.clone() for n, p in engine.model.state_dict().items()}
    modes = [m.training for m in engine.module.modules()]
    with pytest.raises(ZeroDivisionError), engine.inference():  # noqa: PT012 - the block is what is tested
        assert not engine.module.training and not torch.is_grad_enabled()
        assert not any(getattr(m, "gradient_checkpointing", False) for m in engine.module.modules())
        raise ZeroDivisionError
    assert [m.training for m in engine.module.modules()] == modes
    assert any(getattr(m, "gradient_checkpointing", False) for m in engine.module.modules())
    assert torch.is_grad_enabled() and not engine.is_inference
    assert all(torch.equal(p, before[n]) for n, p in engine.model.state_dict().items())


def test_the_modes_do_not_nest_and_do_not_mix():
    engine = _engine()
    with pytest.raises(RuntimeError, match="outside"):
        engine.generate(PROMPTS, SamplingConfig())
    with engine.inference():
        with pytest.raises(RuntimeError, match="already"), engine.inference():
            pass
        with pytest.raises(RuntimeError, match="training forward"):
            engine(torch.tensor([[1]]))


def test_the_same_seed_draws_the_same_and_leaves_torch_s_own_generator_alone():
    engine, settings = _engine(), SamplingConfig(max_new_tokens=8)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    with engine.inference():
        one, two, other = (engine.generate(PROMPTS, settings, seed).tokens for seed in (1, 1, 2))
    assert one == two != other
    assert torch.equal(torch.rand(1), expected)


def test_a_stream_yields_what_generate_returns_without_the_stop_token_and_can_be_dropped():
    engine, settings = _engine(), SamplingConfig(max_new_tokens=20)
    with engine.inference():
        whole = engine.generate([PROMPTS[0]], settings, seed=5)
        streamed = list(engine.stream(PROMPTS[0], settings, seed=5))
        expected = whole.tokens[0][:-1] if whole.finish_reasons == ["eos"] else whole.tokens[0]
        assert streamed == expected
        stream = engine.stream(PROMPTS[0], settings, seed=5)
        assert next(stream) == expected[0]
        stream.close()
        assert list(engine.stream(PROMPTS[0], settings, seed=5)) == expected


def test_a_prompt_without_room_for_the_response_is_refused_with_the_numbers():
    engine = _engine()
    with engine.inference():
        with pytest.raises(UserError, match="prompt of 250 tokens and max_new_tokens 10 exceed the model's 256"):
            engine.generate([[5] * 250], SamplingConfig(max_new_tokens=10))
        assert len(engine.generate([[5] * 246], SamplingConfig(max_new_tokens=10)).tokens[0]) <= 10


# -- peak memory by phase: the meter, the metrics of every stage, and a cache that is given back ----------------------


CPU = torch.device("cpu")
PIECE = b"\1" * 2**20
needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")


def touch(mib: int) -> None:
    """Take pages of the system's own: malloc may have some to spare from tests before."""
    with mmap.mmap(-1, mib << 20) as block:
        for _ in range(mib):
            block.write(PIECE)


@needs_proc
def test_a_block_counts_its_own_peak_and_an_outer_one_those_inside() -> None:
    meter = PeakMeter()
    with meter.block(CPU) as outer:
        with meter.block(CPU) as first:
            touch(200)
        with meter.block(CPU) as second:
            touch(100)
        with meter.block(CPU) as idle:
            pass
    assert 90 * 2**20 < first[0] - second[0] < 110 * 2**20
    assert 90 * 2**20 < second[0] - idle[0] < 110 * 2**20
    assert outer[0] == first[0]
    assert meter.highest(CPU) >= first[0]


@needs_proc
def test_blocks_of_one_name_count_the_largest() -> None:
    metrics = Metrics()
    for mib in (200, 10):
        with peak_in(metrics, "actor/update", CPU):
            touch(mib)
    with peak_in(metrics, "actor/score", CPU):
        touch(10)
    found = metrics.compute()
    assert found["memory/actor/update"] - found["memory/actor/score"] > 150 * 2**20


@needs_proc
def test_a_kernel_that_refuses_to_set_the_mark_back_counts_what_is_resident(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("hybrid_rlhf.engine.device_memory._CLEAR", tmp_path)  # a folder: writing raises OSError
    meter = PeakMeter()
    with meter.block(CPU) as found:
        touch(400)
    assert 0 < found[0] < meter.highest(CPU)


def test_a_system_without_marks_records_nothing(monkeypatch, tmp_path) -> None:
    for name in ("_CLEAR", "_STATUS"):
        monkeypatch.setattr(f"hybrid_rlhf.engine.device_memory.{name}", tmp_path / "none" / name)
    metrics = Metrics()
    with peak_in(metrics, "actor/update", CPU):
        touch(1)
    assert metrics.compute() == {}


def test_the_cache_is_freed_when_the_mode_ends_and_not_when_python_looks_for_circles() -> None:
    model = tiny_causal_lm()
    engine = HybridEngine.for_inference(model, tiny_tokenizer())
    gc.collect()
    gc.disable()
    try:
        with engine.inference():
            engine.generate([[5, 6, 7], [8, 9]], SamplingConfig(max_new_tokens=4))
            keys = weakref.ref(engine._cache.layers[0].keys)
            assert keys() is not None
        assert keys() is None
    finally:
        gc.enable()
