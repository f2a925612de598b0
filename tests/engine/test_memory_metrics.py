"""Peak memory by phase: the meter, the metrics of every stage, and a cache that is given back."""

from __future__ import annotations

import gc
import mmap
import weakref
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.device_memory import PeakMeter, peak_in
from tests.factories.tiny import tiny_causal_lm, tiny_tokenizer

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
