"""Decode steps over static buffers, recorded and replayed: the same tokens, whatever the buffers held before."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.cuda_graphs import CudaCapture, called, num_rows
from hybrid_rlhf.engine.decode.kv_cache import Step
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from hybrid_rlhf.run.loop import TrainConfig
from hybrid_rlhf.training import builders
from tests.factories.architectures import build
from tests.factories.decoding import EAGER, GREEDY, MANY_PROMPTS, PROMPTS, SETTINGS, greedy_by_generate, greedy_tokens

CAPTURED = ["llama", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "bloom", "jamba", "falcon"]
UNCAPTURED = {"falcon"}  # indexes by a Python list, which has to be copied to the device


def _engine(model, capture="auto", device="cuda", **settings):
    return HybridEngine(model.to(device), model, eos_ids=[2], capture=capture, **settings)


@pytest.mark.parametrize("kind", CAPTURED)
def test_replayed_steps_give_the_tokens_of_generate(kind, card, recordings):
    model = build(kind)
    expected = greedy_by_generate(model)
    engine = _engine(model, max_batch=3)  # five ragged requests share three slots
    assert greedy_tokens(engine) == expected
    said = engine.describe()
    assert said["path"] == ("eager" if kind in EAGER else "native")
    assert said["captured"] == (kind not in UNCAPTURED), said
    if kind in UNCAPTURED:
        assert "copy of an index to the card" in said["refused"]["graphs"]
        return
    assert len(recordings) <= 1 + 3 and card.launches["graph"] > 2 * len(recordings)


def test_sizes_of_recorded_steps_are_few():
    assert [num_rows(n, 1000) for n in (1, 2, 3, 5, 9, 33, 64, 65, 130)] == [8, 8, 8, 8, 16, 64, 64, 128, 192]
    assert [num_rows(n, 5) for n in (1, 3, 5)] == [5, 5, 5]


def test_deterministic_kernels_are_chosen_on_a_card_and_said(card, capsys, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's own stays
    try:
        builders.choose_kernels(TrainConfig())
        assert not torch.are_deterministic_algorithms_enabled() and not capsys.readouterr().err
        builders.choose_kernels(TrainConfig(deterministic=True))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert [num_rows(n, 64) for n in (1, 9, 64)] == [64, 64, 64]
        assert "slower" in capsys.readouterr().err and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


def adapted(model):
    """LoRA branches that say something."""
    add_lora(model, LoraConfig(r=4))
    draws = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3, generator=draws)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "has_adapters"), [
    (dict(), False), (dict(repetition_penalty=1.4, temperature=0.8, min_new_tokens=5), False),
    (dict(top_p=0.8, temperature=0.9), True)], ids=str)
def test_replayed_draws_are_those_of_the_uncaptured_engine_as_rows_come_and_go(settings, has_adapters, card,
                                                                               recordings):
    settings = SamplingConfig(max_new_tokens=12, **settings)
    models = [adapted(build("llama")) if has_adapters else build("llama") for _ in range(2)]
    plain, replayed = _engine(models[0], device="cpu", max_batch=9), _engine(models[1], max_batch=9)
    limits = [max(1 + i % 12, settings.min_new_tokens) for i in range(32)]
    with plain.inference():
        expected = plain.generate(MANY_PROMPTS[:32], settings, 5, limits=limits, keep_candidates=True)
    with replayed.inference():
        drawn = replayed.generate(MANY_PROMPTS[:32], settings, 5, limits=limits, keep_candidates=True)
        recorded = len(recordings)
        again = replayed.generate(MANY_PROMPTS[:32], settings, 5, limits=limits, keep_candidates=True)
    assert drawn.tokens == expected.tokens == again.tokens
    for ours, theirs in zip(drawn.logprobs, expected.logprobs, strict=True):
        assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-5)
    assert (drawn.kept is None) == (settings.top_p == 1.0)
    for ours, theirs in zip(drawn.kept or [], expected.kept or [], strict=True):
        assert [words.tolist() for words in ours] == [words.tolist() for words in theirs]
    assert 3 <= recorded <= 11 and len(recordings) == recorded  # by size; the second call found all of them
    assert replayed.describe()["captured"] and not replayed.describe()["refused"] and card.launches["graph"] > 20


def test_steps_that_are_only_called_give_the_same_through_the_device_s_own_kernels():
    model = build("mistral")
    plain, static = _engine(model, None, "cpu", max_batch=5), _engine(model, called, "cpu", max_batch=5)
    found = []
    for engine in (plain, static):
        with engine.inference():
            found.append((engine.generate(MANY_PROMPTS, SETTINGS, seed=1).tokens,
                          list(engine.stream(MANY_PROMPTS[2], SETTINGS))))
    assert found[0] == found[1]
    assert static.describe()["captured"] and not plain.describe()["captured"]


def test_weights_that_training_changes_in_place_reach_the_next_steps(card, recordings):
    model = adapted(build("llama"))
    before = greedy_by_generate(model)
    _scale_adapters(model, -1.5)
    after = greedy_by_generate(model)
    _scale_adapters(model, 1 / -1.5)
    engine = _engine(model)
    with engine.inference():
        assert engine.generate(PROMPTS, GREEDY).tokens == before
        _scale_adapters(model, -1.5)
        recorded = len(recordings)
        assert engine.generate(PROMPTS, GREEDY).tokens == after != before  # by the same recordings
        assert len(recordings) == recorded


@torch.no_grad()
def _scale_adapters(model, factor: float) -> None:
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.mul_(factor)


def test_recordings_go_with_their_cache(card):
    engine = _engine(build("llama"))
    with engine.inference():
        engine.generate(PROMPTS, GREEDY)
        small = weakref.ref(engine._cache)
        assert small().steps is not None
        engine.generate(MANY_PROMPTS[:20], GREEDY)
        large = weakref.ref(engine._cache)
    assert engine._idle_cache.give_back()
    gc.collect()
    assert small() is None and large() is None


def test_a_step_that_bakes_in_a_position_is_found_by_the_probe_and_runs_uncaptured(card, monkeypatch, caplog):
    """The negative control: positions that the host fixes while it records."""
    true_places = Step.places.fget

    def fixed(step):
        with card.quiet():
            position = int(step.positions.max())
        return true_places(step) * 0 + position

    monkeypatch.setattr(Step, "places", property(lambda s: fixed(s) if s.has_idle else true_places(s)))
    model = build("llama")
    expected = greedy_by_generate(model)
    engine = _engine(model)
    assert greedy_tokens(engine) == expected
    assert not engine.describe()["captured"]
    assert "captured steps differ from the plain forward" in engine.describe()["refused"]["graphs"]
    assert "decode steps are not captured" in caplog.text


@pytest.mark.parametrize("ends_itself", [False, True], ids=["torch leaves the pool open", "torch ends the pool"])
def test_after_a_capture_that_cannot_be_ended_the_allocator_still_gives_memory_back(card, ends_itself, monkeypatch):
    import tests.simulated_card.cuda_api as api

    card.breaks_captures = True
    if ends_itself:  # as from pull request 180395 on
        end = api.Graph.capture_end

        def ended(self):
            try:
                end(self)
            finally:
                api._end_pool(0, self._pool)

        monkeypatch.setattr(api.Graph, "capture_end", ended)
    model = build("llama")
    expected = greedy_by_generate(model)
    engine = _engine(model, max_batch=3)
    assert greedy_tokens(engine) == expected
    assert "previous error during capture" in engine.describe()["refused"]["graphs"]
    torch.cuda.empty_cache()
    assert all(segment.pool is None for segment in card.memory.segments) or ends_itself


def test_captures_that_fail_later_are_said_and_steps_of_every_size_run(card, recordings, monkeypatch, caplog):
    capture, plain = CudaCapture.__call__, _engine(build("llama"), None, max_batch=9)
    with plain.inference():
        expected = plain.generate(MANY_PROMPTS[:20], GREEDY).tokens

    def fails_after_the_probe(self, step):
        if recordings:
            raise RuntimeError("operation not permitted when stream is capturing")
        return capture(self, step)

    monkeypatch.setattr(CudaCapture, "__call__", fails_after_the_probe)
    engine = _engine(build("llama"), max_batch=9)
    assert greedy_tokens(engine, MANY_PROMPTS[:20]) == greedy_tokens(engine, MANY_PROMPTS[:20]) == expected
    assert "not permitted" in engine.describe()["refused"]["graphs"] and not engine.describe()["captured"]
    assert "could not be captured" in caplog.text
