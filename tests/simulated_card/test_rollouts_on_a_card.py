"""Decoding on the simulated card: what is recorded, when, how often the host waits, and what runs out of memory."""

from __future__ import annotations

import gc
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.cuda_graphs import STEPS_PER_LOOK, CudaCapture
from hybrid_rlhf.engine.decode.sampler import Sampler
from hybrid_rlhf.engine.train.optimizers import OptimizerConfig
from hybrid_rlhf.engine.train.zero_config import ZeroConfig
from tests.factories.decoding import MANY_PROMPTS
from tests.factories.multi_turn import engine_of as turns_engine
from tests.factories.multi_turn import play
from tests.factories.tiny import optimizer_step, tiny_causal_lm
from tests.simulated_card import simulated_card

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = SamplingConfig(max_new_tokens=24, temperature=0.8, min_new_tokens=24)


def engine_of(trains: bool = False, **settings) -> HybridEngine:
    model = tiny_causal_lm().to("cuda")
    engine = HybridEngine(model, model, eos_ids=[2], **settings)
    if trains:
        engine.prepare_training(OptimizerConfig(learning_rate=1e-2), lambda _: 1.0, ZeroConfig())
    return engine


def drawn(engine: HybridEngine, settings: SamplingConfig = SETTINGS, seed: int = 0) -> list[list[int]]:
    with engine.inference():
        return engine.generate(MANY_PROMPTS[:20], settings, seed).tokens


def update(engine: HybridEngine) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]], device=engine.device)
    optimizer_step(engine, [ids], lambda piece: engine.module(input_ids=piece, labels=piece).loss)


def test_generations_in_one_mode_share_recordings_that_read_only_what_is_alive(card, recordings):
    """min_new_tokens: a recorded draw reads the sampler's table of stop tokens, which ended with the first call."""
    engine = engine_of(max_batch=8)
    with engine.inference():
        first = engine.generate(MANY_PROMPTS[:8], SETTINGS, 1).tokens
        gc.collect()
        count = len(recordings)
        assert engine.generate(MANY_PROMPTS[:8], SETTINGS, 1).tokens == first
    assert len(recordings) == count


def test_turns_go_on_on_the_card_as_on_the_processor(card):
    """Some in their own slots, some read again for want of slots; decode steps are replayed between them."""
    for slots in (6, 3):
        rows, _ = play(turns_engine(tiny_causal_lm().to("cuda"), max_batch=slots))
        assert card.launches["graph"] > 10
        assert rows == play(turns_engine(tiny_causal_lm(), max_batch=slots))[0]


def test_the_host_waits_at_every_eighth_step_only(card):
    engine = engine_of(max_batch=8)
    with engine.inference():
        engine.generate(MANY_PROMPTS[:8], SETTINGS)
        card.reset()
        engine.generate(MANY_PROMPTS[:8], SamplingConfig(max_new_tokens=64, min_new_tokens=64))
    steps = [n for (_, place), n in card.waits.items() if "cuda_graphs.py" in place]
    assert sum(steps) <= 2 * 64 // STEPS_PER_LOOK + 1, card.waits  # tokens and log-probabilities; one synchronize
    entering = sum(card.waits.values()) - sum(steps)
    assert entering <= 12, card.waits  # once for all eight: prompts, tables of rows


def test_launches_of_a_decoder_layer_where_nothing_is_recorded():
    """Llama: two norms, seven products, positions of queries and keys, attention, gate (two over 4 bits), two sums;
    adapters take two more for each product. OPT has no positions and no gate, and adds biases.
    In a process of its own, for what other tests leave in a model's class (masks, attention) would count."""
    told = subprocess.run([sys.executable, "-m", "tests.simulated_card.layer_launches"], cwd=ROOT, check=True,
                          capture_output=True, text=True, timeout=300).stdout
    found = json.loads(told.splitlines()[-1])
    for case, most in (("llama", 15), ("llama, lora", 29), ("opt", 13), ("llama, 4bit", 16), ("llama, 4bit, lora", 30)):
        assert most <= found[case] <= most + 0.5, case  # a few of the first step's own


@pytest.mark.slow
def test_cache_and_recordings_stay_between_rollouts_until_memory_runs_out(card, recordings, caplog):
    engine = engine_of(max_batch=8, trains=True)
    found, counts = [], []
    for i in range(3):
        found.append(drawn(engine, seed=i))
        counts.append(len(recordings))
        if i < 2:
            update(engine)
    assert counts[2] == counts[1] > counts[0], counts  # kept once a step had been made
    held = torch.cuda.memory_allocated()
    card.memory.fail_at = card.memory.count + 20
    with caplog.at_level(logging.WARNING):
        update(engine)
    assert "the decode cache is not kept between rollouts any more" in caplog.text
    assert engine.oom_limits == {} and torch.cuda.memory_allocated() < held - 50_000
    plain = engine_of(max_batch=8, trains=True, capture=None)
    for i in range(3):
        assert drawn(plain, seed=i) == found[i]
        update(plain)


@pytest.mark.slow
def test_a_cache_that_has_no_room_beside_training_goes_when_the_mode_ends(recordings):
    with simulated_card(total=1 << 30) as card:
        engine = engine_of(max_batch=8, trains=True)
        counts = []
        for i in range(3):
            drawn(engine, seed=i)
            counts.append(len(recordings))
            others = torch.empty(int(0.9 * card.memory.free), dtype=torch.uint8, device="cuda")
            update(engine)
            del others
        assert counts[0] < counts[1] < counts[2]


@pytest.mark.slow
@pytest.mark.parametrize("moves", [lambda e: e.module.to("cpu").to("cuda"), lambda e: e.offload_when_idle()])
def test_weights_that_moved_are_not_read_where_they_were(card, moves):
    engine = engine_of(max_batch=8)
    tokens = drawn(engine)
    moves(engine)
    assert drawn(engine) == drawn(engine) == tokens


# -- memory runs out --------------------------------------------------------------------------------------------------


def failing_captures(card, monkeypatch, times: int, error: Exception):
    """The first captures of rollouts (those of the probe go well) fail with `error`."""
    capture, count = CudaCapture.__call__, [times]

    def tried(self, step):
        if count[0] and isinstance(step.args[2], Sampler):
            count[0] -= 1
            raise error
        return capture(self, step)

    monkeypatch.setattr(CudaCapture, "__call__", tried)


@pytest.mark.slow
def test_a_capture_that_runs_out_of_memory_goes_on_with_fewer_slots_and_captures_again(card, monkeypatch, caplog):
    expected = drawn(engine_of(max_batch=8))
    failing_captures(card, monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory."))
    engine = engine_of(max_batch=8)
    with caplog.at_level(logging.WARNING):
        assert drawn(engine) == expected
    assert engine.oom_limits == {"slots": 4} and engine.describe()["captured"], caplog.text
    assert "8 slots of" in caplog.text


def test_a_capture_with_one_slot_that_runs_out_of_memory_leaves_the_step_as_it_is(card, monkeypatch):
    prompt, settings = MANY_PROMPTS[3], SamplingConfig(max_new_tokens=6, temperature=0)
    plain = engine_of(max_batch=1, capture=None)
    with plain.inference():
        expected = plain.generate([prompt], settings).tokens, list(plain.stream(prompt, settings))
    engine = engine_of(max_batch=1)
    with engine.inference():
        failing_captures(card, monkeypatch, 2, torch.OutOfMemoryError("CUDA out of memory."))
        assert (engine.generate([prompt], settings).tokens, list(engine.stream(prompt, settings))) == expected
    assert engine.describe()["captured"] and engine.oom_limits == {}


def test_what_broke_a_recording_off_is_told_and_not_that_its_end_failed(card, monkeypatch):
    def ends(self):
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", ends)
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture()(lambda: torch.empty(9 << 30, dtype=torch.uint8, device="cuda"))
    card.recording = None


def test_unused_memory_goes_back_before_the_first_recording(card):
    engine = engine_of(max_batch=8)
    block = torch.empty(card.memory.free - (60 << 20), dtype=torch.uint8, device="cuda")
    del block  # reserved by torch, and used by nobody
    drawn(engine)
    assert engine.describe()["captured"] and not engine.oom_limits, engine.describe()


@pytest.mark.parametrize("at", [5, 120])
def test_memory_that_runs_out_in_the_probe_is_no_reason_to_take_another_path(card, at):
    engine = engine_of(max_batch=8)
    card.memory.fail_at = card.memory.count + at
    with pytest.raises(torch.OutOfMemoryError):
        drawn(engine)
    assert drawn(engine) and engine.describe()["path"] == "native" and not engine.describe()["refused"]
