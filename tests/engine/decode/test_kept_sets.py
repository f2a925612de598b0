"""What truncated sampling drew from, token by token: the words that transformers' warpers leave of the plain forward's
logits, on every path by which the engine samples, and whatever shares the batch."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.engine.decode.cuda_graphs import called
from hybrid_rlhf.engine.decode.request import Request, following
from tests.factories.architectures import build, roformer
from tests.factories.decoding import MANY_PROMPTS, decode_engine
from tests.factories.warpers import warped_by_model

CUTS = [dict(top_p=0.8), dict(top_k=7, temperature=0.7), dict(min_p=0.4), dict(top_k=30, top_p=0.6, min_p=0.1)]


def agree(model, prompt, tokens, logprobs, kept, settings) -> None:
    left = warped_by_model(model, prompt, tokens, **settings)
    assert [words.tolist() for words in kept] == [row.isfinite().nonzero()[:, 0].tolist() for row in left]
    truth = left.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("path", ["slots", "static", "generate"])
def test_the_sets_are_what_transformers_leaves_of_the_plain_forward(path, cut):
    model = roformer() if path == "generate" else build("llama")
    engine = decode_engine(model, max_batch=5, capture=called if path == "static" else None)
    settings = SamplingConfig(max_new_tokens=12, **cut)
    with engine.inference():
        plain = engine.generate(MANY_PROMPTS[:16], settings, seed=3)
        drawn = engine.generate(MANY_PROMPTS[:16], settings, seed=3, keep_candidates=True)
    assert (engine.describe()["path"] == "generate") == (path == "generate")
    assert drawn.tokens == plain.tokens and plain.kept is None
    assert len({len(words) for row in drawn.kept for words in row}) > (1 if cut != CUTS[1] else 0)
    for i, prompt in enumerate(MANY_PROMPTS[:16]):
        agree(model, prompt, drawn.tokens[i], drawn.logprobs[i], drawn.kept[i], cut)


def test_nothing_is_kept_where_nothing_is_cut_off():
    engine = decode_engine(build("llama"))
    for settings in (SamplingConfig(max_new_tokens=4), SamplingConfig(max_new_tokens=4, temperature=0, top_p=0.5)):
        with engine.inference():
            plain = engine.generate(MANY_PROMPTS[:4], settings)
            drawn = engine.generate(MANY_PROMPTS[:4], settings, keep_candidates=True)
        assert drawn.kept is None and (drawn.tokens, drawn.logprobs) == (plain.tokens, plain.logprobs)


def test_a_stop_that_may_not_be_drawn_yet_is_not_in_the_set():
    engine = decode_engine(build("llama"))
    settings = SamplingConfig(max_new_tokens=6, min_new_tokens=3, top_p=0.999, temperature=2.0)
    with engine.inference():
        kept = engine.generate(MANY_PROMPTS[:4], settings, keep_candidates=True).kept
    assert [[2 in words for words in row] for row in kept] == [[False] * 3 + [True] * 3] * 4


@pytest.mark.parametrize("path", ["slots", "static", "generate"])
def test_each_turn_has_its_own_sets(path):
    model = roformer() if path == "generate" else build("llama")
    engine = decode_engine(model, max_batch=2, capture=called if path == "static" else None)
    settings = SamplingConfig(max_new_tokens=20, top_p=0.7)
    ended = []
    with engine.inference():
        turns = engine.open_turns(3, 40, settings, True)
        for i in range(3):
            turns.submit(Request(i, MANY_PROMPTS[i + 1], 3 + i, seed=1, may_go_on=True))
        while turns.is_busy:
            for request in turns.step():
                ended.append(request)
                if request.num_drawn == 0:
                    turns.submit(following(request, [7, 8, 9], 4))
    assert len(ended) == 6
    for request in ended:
        agree(model, list(request.prompt), request.tokens, request.logprobs, request.kept, {"top_p": 0.7})


def test_a_turn_that_is_drawn_again_for_want_of_memory_keeps_each_set_once(monkeypatch):
    model = build("llama")
    engine = decode_engine(model, max_batch=4)
    settings, failures = SamplingConfig(max_new_tokens=12, top_k=9), iter([False] * 6 + [True])
    ended = []
    with engine.inference():
        turns = engine.open_turns(4, 40, settings, True)
        decode = engine._runner.decode

        def short_once(*given, **named):
            if next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return decode(*given, **named)

        monkeypatch.setattr(engine._runner, "decode", short_once)
        for i in range(4):
            turns.submit(Request(i, MANY_PROMPTS[i + 1], 12, may_go_on=True))
        while turns.is_busy:
            ended += turns.step()
    assert engine.oom_limits["slots"] == 2
    for request in ended:
        agree(model, list(request.prompt), request.tokens, request.logprobs, request.kept, {"top_k": 9})
