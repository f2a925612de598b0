"""Requests that go on where an earlier one ended: the same log-probabilities as one plain forward of the whole
sequence, whatever slots there are and in whatever order the turns come back."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hybrid_rlhf.engine import SamplingConfig
from hybrid_rlhf.engine.decode.request import Request, following
from hybrid_rlhf.engine.decode.runner import Runner
from tests.factories.architectures import build
from tests.factories.decoding import plain_logprobs
from tests.factories.multi_turn import PROMPTS, engine_of, play
from tests.factories.tiny import tiny_causal_lm


def check_against_plain(model, rows, said, tolerance=1e-4):
    for prompt, row, mine in zip(PROMPTS, rows, said, strict=True):
        assert len(row) == len(prompt) + len(mine)
        for logprob, truth in zip(mine, plain_logprobs(model, prompt, row[len(prompt):]), strict=True):
            if logprob is not None:
                assert_close(torch.tensor(logprob), truth.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("max_batch", [64, 6, 2, 1])
def test_turns_have_the_logprobs_of_a_plain_forward_of_all_that_was_said(max_batch):
    model = tiny_causal_lm().eval()
    rows, said = play(engine_of(model, max_batch=max_batch))
    check_against_plain(model, rows, said)
    assert all(None in logprobs for logprobs in said)


@pytest.mark.parametrize(("late", "max_batch"), [(0, 3), (1, 6), (9, 6), (9, 3)])
def test_what_is_drawn_depends_neither_on_the_slots_nor_on_when_a_turn_goes_on(late, max_batch):
    model = tiny_causal_lm().eval()
    rows, said = play(engine_of(model))
    again, logprobs = play(engine_of(model, max_batch=max_batch), late=late, order=lambda due: due[::-1])
    assert again == rows
    for a, b in zip(said, logprobs, strict=True):
        assert_close(torch.tensor([x for x in a if x is not None]), torch.tensor([x for x in b if x is not None]))


@pytest.mark.parametrize("kind", ["gemma2", "mamba", "bloom", "qwen3_moe", "deepseek_v3"])
def test_other_architectures_go_on_as_they_say_it_in_one_forward(kind):
    model = build(kind).eval()
    rows, said = play(engine_of(model, max_batch=4))
    check_against_plain(model, rows, said, 2e-3)


def test_a_turn_that_goes_on_reads_its_new_tokens_alone(monkeypatch):
    """Three turns of one sequence: the prompt, then what was added with the last token said, and nothing twice."""
    read = []
    forward = Runner._forward

    def counted(self, module, cache, step, ids):
        read.append((step.is_prefill, ids.numel()))
        return forward(self, module, cache, step, ids)

    model = tiny_causal_lm().eval()
    engine = engine_of(model)
    with engine.inference():
        pass  # the probe
    monkeypatch.setattr(Runner, "_forward", counted)
    with engine.inference():
        turns = engine.open_turns(1, 64, SamplingConfig(max_new_tokens=64))
        turns.submit(Request(0, [5, 6, 7, 8, 9, 10], 4, may_go_on=True))
        for added in ([11, 12, 13], [14, 15]):
            ended = []
            while not ended:
                ended = turns.step()
            turns.submit(following(ended[0], added, 3))
        while turns.is_busy:
            turns.step()
    assert [count for is_prefill, count in read if is_prefill] == [5, 3, 2]  # the last token said and all but one added
    assert sum(count for is_prefill, count in read if not is_prefill) == 4 + 3 + 3


def test_out_of_memory_draws_the_turns_again_with_fewer_slots(monkeypatch):
    model = tiny_causal_lm().eval()
    rows, _ = play(engine_of(model))
    engine = engine_of(model)
    decode, calls = Runner.decode, []

    def failing(self, cache, *rest, **named):
        calls.append(cache.num_slots)
        if len(calls) in (9, 15):
            raise torch.OutOfMemoryError("out of memory")
        return decode(self, cache, *rest, **named)

    with engine.inference():
        pass
    monkeypatch.setattr(Runner, "decode", failing)
    assert play(engine)[0] == rows
    assert calls[0] == 6 and calls[-1] == 1


def test_the_memory_and_the_slots_of_turns_are_told_as_those_of_other_responses(monkeypatch):
    """Keys and values of the tiny model: 2 layers, 2 heads of 8, fp32, are 256 bytes a token."""
    engine = engine_of(tiny_causal_lm().eval(), max_batch=4)
    play(engine)
    assert (engine.describe()["slots"], engine.describe()["kv_bytes"]) == (4, 4 * 64 * 256)

    def by_generate(self):
        self.path, self.bytes_per_column = "generate", 1.0

    monkeypatch.setattr(Runner, "_find_path", by_generate)
    engine = engine_of(tiny_causal_lm().eval(), max_batch=2)
    play(engine, num_turns=1)
    # prompts of six lengths are drawn one by one, the longest of 8 and 7 tokens; the last one is never stored
    assert (engine.describe()["slots"], engine.describe()["kv_bytes"]) == (2, (8 + 7 - 1) * 256)


def test_a_model_sampled_by_generate_plays_turns_too(monkeypatch):
    def by_generate(self):
        self.path, self.bytes_per_column = "generate", 1.0

    model = tiny_causal_lm().eval()
    rows, _ = play(engine_of(model))
    monkeypatch.setattr(Runner, "_find_path", by_generate)
    again, said = play(engine_of(model))
    assert again == rows
    check_against_plain(model, again, said)


def test_a_bfloat16_model_goes_on_as_exactly_as_it_begins():
    model = tiny_causal_lm().to(torch.bfloat16).eval()
    rows, said = play(engine_of(model))
    check_against_plain(model, rows, said, 0.1)


def test_long_answers_that_come_back_together_are_read_in_bounded_forwards(monkeypatch):
    """Six of 3000 tokens at once would be one forward of 18000; short ones are not padded to a long one's length."""
    read = []
    forward = Runner._forward

    def counted(self, module, cache, step, ids):
        if step.is_prefill:
            read.append(tuple(ids.shape))
        return forward(self, module, cache, step, ids)

    model = tiny_causal_lm(max_position_embeddings=4096).eval()
    engine = engine_of(model)
    added = [3000, 5, 3000, 700, 600, 4]
    with engine.inference():
        turns = engine.open_turns(6, 3100, SamplingConfig(max_new_tokens=64))
        for i in range(6):
            turns.submit(Request(i, [5 + i, 6, 7][: 2 + i % 2], 2, seed=3, may_go_on=True))
        ended = []
        while len(ended) < 6:
            ended += turns.step()
        monkeypatch.setattr(Runner, "_forward", counted)
        for request in ended:
            turns.submit(following(request, [9] * added[request.number], 2))
        rows, said = {}, {}
        while turns.is_busy:
            for request in turns.step():
                rows[request.number], said[request.number] = [*request.prompt, *request.tokens], request.logprobs
    assert sorted(read) == [(1, 3000), (1, 3000), (2, 5), (2, 700)]
    for number, row in rows.items():
        size = len(said[number])
        truth = plain_logprobs(model, row[:-size], row[-size:]).float()
        assert_close(torch.tensor(said[number]), truth, atol=1e-4, rtol=1e-4)
