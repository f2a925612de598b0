"""Decode steps over static buffers, recorded and replayed: the same tokens, whatever the buffers held before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode import runner
from hybrid_rlhf.engine.decode.cuda_graphs import called, num_rows
from hybrid_rlhf.engine.decode.kv_cache import Step
from hybrid_rlhf.models.lora import LoraConfig, add_lora
from tests.engine.decode.tape import OPS, TapeCapture
from tests.factories.architectures import ARCHITECTURES, build
from tests.factories.decoding import EAGER, GREEDY, MANY_PROMPTS, PROMPTS, SETTINGS, greedy_by_generate, greedy_tokens

TAPED = [kind for kind in ARCHITECTURES if kind not in ("mixtral", "qwen3_moe", "qwen2", "phi3")]

UNCAPTURED = {"falcon"}  # indexes by a Python list, which has to be copied to the device


def _engine(model, capture, **settings):
    return HybridEngine(model, model, eos_ids=[2], capture=capture, **settings)


@pytest.fixture
def tape(monkeypatch):
    """A capture that replays operations as a card would, without Python; over kernels that it can see."""
    monkeypatch.setattr(runner, "ops_for", lambda _: OPS)
    return TapeCapture()


@pytest.mark.parametrize("kind", TAPED)
def test_replayed_steps_give_the_tokens_of_generate(kind, tape):
    model = build(kind)
    engine = _engine(model, tape, max_batch=3)  # five ragged requests share three slots
    assert greedy_tokens(engine) == greedy_by_generate(model)
    said = engine.describe()
    assert said["path"] == ("eager" if kind in EAGER else "native")
    assert said["captured"] == (kind not in UNCAPTURED), said
    if kind in UNCAPTURED:
        assert "not permitted" in said["refused"]["graphs"]
        return
    assert tape.recordings <= 1 + 3 and tape.replays > 2 * tape.recordings


def test_sizes_of_recorded_steps_are_few():
    assert [num_rows(n, 1000) for n in (1, 2, 3, 5, 9, 33, 64, 65, 130)] == [8, 8, 8, 8, 16, 64, 64, 128, 192]
    assert [num_rows(n, 5) for n in (1, 3, 5)] == [5, 5, 5]


@pytest.mark.parametrize("settings", [dict(), dict(repetition_penalty=1.4, temperature=0.8), dict(min_new_tokens=5)],
                         ids=str)
def test_replayed_draws_are_those_of_the_uncaptured_engine_as_rows_come_and_go(settings, tape):
    model, settings = build("llama"), SamplingConfig(max_new_tokens=12, **settings)
    plain, replayed = _engine(model, None, max_batch=9), _engine(model, tape, max_batch=9)
    limits = [1 + i % 12 for i in range(32)]
    limits = [max(n, settings.min_new_tokens) for n in limits]
    with plain.inference():
        expected = plain.generate(MANY_PROMPTS[:32], settings, seed=5, limits=limits)
    with replayed.inference():
        drawn = replayed.generate(MANY_PROMPTS[:32], settings, seed=5, limits=limits)
        recorded = tape.recordings
        again = replayed.generate(MANY_PROMPTS[:32], settings, seed=5, limits=limits)
    assert drawn.tokens == expected.tokens == again.tokens
    for ours, theirs in zip(drawn.logprobs, expected.logprobs, strict=True):
        assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-5)
    assert 3 <= recorded <= 11 and tape.recordings == recorded  # by size; the second call found all of them


def test_steps_that_are_only_called_give_the_same_through_the_device_s_own_kernels():
    model = build("mistral")
    plain, static = _engine(model, None, max_batch=5), _engine(model, called, max_batch=5)
    found = []
    for engine in (plain, static):
        with engine.inference():
            found.append((engine.generate(MANY_PROMPTS, SETTINGS, seed=1).tokens,
                          list(engine.stream(MANY_PROMPTS[2], SETTINGS))))
    assert found[0] == found[1]
    assert static.describe()["captured"] and not plain.describe()["captured"]


def test_weights_that_training_changes_in_place_reach_the_next_steps(tape):
    model = build("llama")
    add_lora(model, LoraConfig(r=4))
    for up in [p for n, p in model.named_parameters() if "lora_B" in n]:
        torch.nn.init.normal_(up, std=0.3)
    engine = _engine(model, tape)
    before = greedy_by_generate(model)
    with engine.inference():
        assert engine.generate(PROMPTS, GREEDY).tokens == before
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.mul_(-1.5)
        recorded = tape.recordings
        changed = engine.generate(PROMPTS, GREEDY).tokens  # by the same recordings
        assert tape.recordings == recorded
    assert changed == greedy_by_generate(model) != before


def test_recordings_go_with_their_cache(tape):
    engine = _engine(build("llama"), tape)
    with engine.inference():
        engine.generate(PROMPTS, GREEDY)
        small = weakref.ref(engine._cache)
        assert small().steps is not None
        engine.generate(PROMPTS, SamplingConfig(max_new_tokens=30, temperature=0))
        large = weakref.ref(engine._cache)
    gc.collect()
    assert small() is None and large() is None


def test_a_step_that_bakes_in_a_position_is_found_by_the_probe_and_runs_uncaptured(tape, monkeypatch, caplog):
    """The negative control: positions that the host fixes while it records."""
    true_places = Step.places.fget
    monkeypatch.setattr(Step, "places", property(lambda step: true_places(step) * 0 + int(max(
        step.positions.flatten().numpy())) if step.has_idle else true_places(step)))
    model = build("llama")
    engine = _engine(model, tape)
    assert greedy_tokens(engine) == greedy_by_generate(model)
    assert not engine.describe()["captured"]
    assert "captured steps differ from the plain forward" in engine.describe()["refused"]["graphs"]
    assert "decode steps are not captured" in caplog.text


def test_a_capture_that_fails_later_is_said_and_the_step_runs_as_it_is(tape, caplog):
    model = build("llama")

    def fails_after_the_probe(step):
        if tape.recordings:
            raise RuntimeError("operation not permitted when stream is capturing")
        return tape(step)

    engine = _engine(model, fails_after_the_probe)
    assert greedy_tokens(engine) == greedy_by_generate(model)
    assert greedy_tokens(engine) == greedy_by_generate(model)
    assert "not permitted" in engine.describe()["refused"]["graphs"] and not engine.describe()["captured"]
    assert "could not be captured" in caplog.text


def test_what_would_make_the_host_wait_is_not_captured(tape, monkeypatch):
    model = build("llama")
    true_forward = model.lm_head.forward

    def waits(hidden):
        return true_forward(hidden) * (1.0 + 0.0 * float(hidden.sum()))

    monkeypatch.setattr(model.lm_head, "forward", waits)
    engine = _engine(model, tape)
    assert greedy_tokens(engine) == greedy_by_generate(model)
    assert "_local_scalar_dense" in engine.describe()["refused"]["graphs"]
