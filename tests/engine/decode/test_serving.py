"""Requests that come and go while others run: each draws what it draws alone, under its own settings."""

from __future__ import annotations

import random

import pytest

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode.cuda_graphs import called
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.runner import Runner
from tests.factories.architectures import build

PROMPTS = [[(3 + 7 * i + 5 * j * j) % 90 + 5 for j in range(1 + (5 * i) % 11)] for i in range(40)]
SETTINGS = [dict(), dict(temperature=0), dict(temperature=0.7, top_p=0.9), dict(top_k=5, repetition_penalty=1.3),
            dict(min_new_tokens=6)]


def _requests() -> list[Request]:
    return [Request(i % 3, PROMPTS[i], 4 + i % 9, seed=i,
                    sampling=SamplingConfig(max_new_tokens=4 + i % 9, **(SETTINGS[i % 5] if i % 5 < 4 else dict(
                        min_new_tokens=4)))) for i in range(40)]


def _alone(model, request: Request) -> list[int]:
    with HybridEngine(model, model, eos_ids=[2], capture=None).inference() as engine:
        return engine.generate([request.prompt], request.sampling, request.seed, numbers=[request.number]).tokens[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bloom", "jamba"])
@pytest.mark.parametrize("capture", [None, called], ids=["plain", "static"])
def test_requests_that_enter_and_leave_at_any_time_draw_what_they_draw_alone(kind, capture):
    if capture and kind != "llama":
        pytest.skip("static buffers are the same for all")
    model, order = build(kind), random.Random(3)
    requests, dropped, waiting = _requests(), [], None
    with HybridEngine(model, model, eos_ids=[2], capture=capture).inference() as engine:
        serving = engine.serve(5, 64)
        waiting = list(requests)
        while serving.step() or waiting:
            for _ in range(min(len(waiting), order.randrange(4))):
                serving.submit(waiting.pop(0))
            if order.random() < 0.1:
                gone = order.choice([r for r in requests if r not in waiting] or [requests[0]])
                serving.drop(gone)
                dropped.append(id(gone))
        assert not serving.step()
    num_whole = 0
    for request in requests:
        alone = _alone(model, request)
        num_whole += request.tokens == alone
        assert request.tokens == alone or (id(request) in dropped and alone[: len(request.tokens)] == request.tokens)
    assert 40 - len(dropped) <= num_whole < 40


def test_a_model_that_only_generate_can_run_serves_one_request_after_the_other(monkeypatch):
    model = build("llama")
    monkeypatch.setattr(Runner, "_try", lambda self, path: "refused for the test")
    with HybridEngine(model, model, eos_ids=[2]).inference() as engine:
        alone = [engine.generate([p], SamplingConfig(max_new_tokens=5), seed=3).tokens[0] for p in PROMPTS[:4]]
        assert engine.describe()["path"] == "generate"
        serving = engine.serve(4, 64)
        requests = [Request(0, p, 5, 3, sampling=SamplingConfig(max_new_tokens=5)) for p in PROMPTS[:4]]
        for request in requests:
            serving.submit(request)
        serving.step()
        serving.drop(requests[0])
        serving.drop(requests[2])
        while serving.step():
            pass
    assert serving.num_slots == 1
    assert [r.tokens for r in requests] == [alone[0][:1], alone[1], [], alone[3]]


def test_what_cannot_run_is_refused_before_it_enters():
    model = build("llama")
    with HybridEngine(model, model, eos_ids=[2]).inference() as engine:
        serving = engine.serve(2, 16)
        for request in (Request(0, [], 4), Request(0, [5] * 12, 5), Request(0, [5] * 100, 50), Request(0, [5], 0)):
            with pytest.raises(UserError):
                serving.check(request)
        serving.check(Request(0, [5] * 12, 4))
