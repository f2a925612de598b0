"""Slots that share the pages of a cache draw what slots of full length draw, preempted requests too."""

from __future__ import annotations

import pytest
import torch

from hybrid_rlhf.engine import HybridEngine, SamplingConfig
from hybrid_rlhf.engine.decode import pages as pages_module
from hybrid_rlhf.engine.decode.cuda_graphs import called
from hybrid_rlhf.engine.decode.pages import Pages, lazy_zeros
from hybrid_rlhf.engine.decode.request import Request
from hybrid_rlhf.engine.decode.runner import Runner
from hybrid_rlhf.engine.decode.scheduler import Scheduler
from tests.factories.architectures import build
from tests.factories.decoding import GREEDY, MANY_PROMPTS, decode_engine, greedy_by_generate
from tests.factories.multi_turn import engine_of, play
from tests.factories.tiny import tiny_causal_lm

COLUMN = 256  # bytes of a column of the tiny Llama: 2 layers, keys and values, 2 heads of 8, fp32
PROMPTS = MANY_PROMPTS[:24]
SETTINGS = SamplingConfig(max_new_tokens=12, temperature=0.9)


@pytest.fixture
def small_pages(monkeypatch):
    """Pages of 4 columns, and the schedulers that run over them."""
    schedulers = []
    begin = Scheduler.__init__

    def noted(self, *given, **named):
        begin(self, *given, **named)
        schedulers.append(self)

    monkeypatch.setattr(pages_module, "_SIZE", 4)
    monkeypatch.setattr(pages_module, "SIZES", {})
    monkeypatch.setattr(Scheduler, "__init__", noted)
    return schedulers


def drawn(engine, prompts=PROMPTS, sampling=SETTINGS, **named):
    with engine.inference():
        return engine.generate(prompts, sampling, seed=5, **named)


def test_pages_are_given_shared_and_taken_back():
    pages = Pages(3, 3, 6, 4, torch.device("cpu"))
    assert pages.grow(0, 9) and pages.num_free == 3 and pages.held(0) == 12
    assert pages.share(0, 1, 9) == 8  # two whole pages; the ninth column is in a third
    assert pages.grow(1, 9) and pages.num_free == 2
    assert not pages.grow(2, 12) and pages.held(2) == 0 and pages.num_free == 2
    pages.sync()
    assert pages.table.tolist() == [[0, 1, 2], [0, 1, 3], [6, 6, 6]]
    pages.cut(0, 0)
    assert pages.num_free == 3  # the shared ones are still the other's
    assert pages.grow(2, 9) and pages.page_of(2, 8) == 5
    pages.sync()
    assert pages.table.tolist() == [[6, 6, 6], [0, 1, 3], [2, 4, 5]]
    assert pages.most_used == 6
    pages.reset()
    assert pages.num_free == 6


def test_zeros_of_a_processor_are_taken_as_they_are_written():
    zeros = lazy_zeros((1 << 18, 1 << 10), torch.zeros(1, dtype=torch.bfloat16))  # half a GiB
    with open("/proc/self/status") as status:
        resident = int(next(line for line in status if line.startswith("VmRSS")).split()[1])
    zeros[::4096] = 1.0
    with open("/proc/self/status") as status:
        after = int(next(line for line in status if line.startswith("VmRSS")).split()[1])
    assert zeros.dtype == torch.bfloat16 and float(zeros[4096, 5]) == 1 and not zeros[1:4096:97].any()
    assert after - resident < 64 * 1024  # KiB


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_moe", "gpt2", "opt",
                                  "bloom", "jamba"])
def test_the_tokens_are_those_of_generate_with_few_pages_too(kind, small_pages):
    model = build(kind)
    engine = decode_engine(model, max_batch=6)
    expected = greedy_by_generate(model, PROMPTS[:9], GREEDY)
    assert drawn(engine, PROMPTS[:9], GREEDY).tokens == expected
    with engine.inference():
        engine.max_kv_bytes = int(engine._runner.bytes_per_column * 32 + engine._runner.bytes_per_slot)
        assert engine.generate(PROMPTS[:9], GREEDY).tokens == expected  # one sequence is 19 columns at most
    is_paged = [scheduler.cache.pages is not None for scheduler in small_pages]
    assert is_paged == [kind not in ("bloom", "jamba")] * 2  # eager attention and states keep whole slots
    assert small_pages[-1].num_preempted > 0 or not is_paged[0]


@pytest.mark.parametrize("capture", [None, called], ids=["plain", "captured"])
@pytest.mark.parametrize("sampling", [SETTINGS, SamplingConfig(max_new_tokens=12, repetition_penalty=1.4, top_k=20,
                                                               min_new_tokens=3)], ids=["plain", "penalty"])
def test_draws_are_those_of_whole_slots_bit_for_bit(sampling, capture, small_pages, monkeypatch):
    model = build("llama")
    prompts = [p for p in PROMPTS[2:10] for _ in range(3)]  # groups that begin with the same pages
    paged = drawn(decode_engine(model, max_batch=7, capture=capture), prompts, sampling)
    monkeypatch.setattr(Runner, "takes_pages", False)
    whole = drawn(decode_engine(model, max_batch=7, capture=capture), prompts, sampling)
    assert small_pages[0].cache.pages is not None and small_pages[1].cache.pages is None
    assert paged.tokens == whole.tokens and paged.logprobs == whole.logprobs
    assert len({tuple(row) for row in paged.tokens}) > 20


@pytest.mark.parametrize("capture", [None, called], ids=["plain", "captured"])
def test_a_preempted_request_goes_on_as_it_would_have(capture, small_pages):
    model = build("llama")
    sampling = SamplingConfig(max_new_tokens=30, repetition_penalty=1.3)
    roomy = drawn(decode_engine(model, max_batch=12), PROMPTS, sampling)
    few = decode_engine(model, max_batch=12, capture=capture, max_kv_bytes=COLUMN * 4 * 30)
    tight = drawn(few, PROMPTS, sampling)
    assert few.num_preempted == small_pages[1].num_preempted > 5
    assert tight.tokens == roomy.tokens
    for ours, theirs in zip(tight.logprobs, roomy.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=1e-4, rtol=1e-4)
    assert few.describe()["kv_bytes"] <= COLUMN * 4 * 30


def test_256_ragged_sequences_run_where_64_whole_slots_fit(small_pages, monkeypatch):
    model, rows = build("llama"), []
    decode = Runner.decode

    def counted(self, cache, tokens, *rest, **named):
        rows.append(len(tokens))
        return decode(self, cache, tokens, *rest, **named)

    limits = [4 + (i * i) % 29 for i in range(256)]  # of at most 32; whole slots hold 11 + 32 columns
    prompts = [MANY_PROMPTS[i % 64] for i in range(256)]
    engine = decode_engine(model, max_batch=256, max_kv_bytes=64 * 44 * COLUMN)
    with engine.inference():
        monkeypatch.setattr(Runner, "decode", counted)
        found = engine.generate(prompts, SamplingConfig(max_new_tokens=32), seed=1, limits=limits)
        assert engine.describe()["slots"] == 256 and engine.kv_bytes <= 64 * 44 * COLUMN
    assert max(rows) > 200
    alone = decode_engine(model)
    with alone.inference():
        for i in range(0, 256, 51):
            assert alone.generate([prompts[i]], SamplingConfig(max_new_tokens=32), seed=1, numbers=[i],
                                  limits=limits[i:i + 1]).tokens == [found.tokens[i]]


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3", "gpt_oss"])
def test_recorded_steps_of_a_card_follow_the_pages(kind, small_pages, card, recordings, monkeypatch):
    """Pages of 4 columns, and a kernel that would read as many at a time."""
    triton_attention = pytest.importorskip("hybrid_rlhf.kernels.triton_attention")
    form_for = triton_attention.form_for
    monkeypatch.setattr(triton_attention, "form_for", lambda *sizes: form_for(*sizes)._replace(
        sizes=form_for(*sizes).sizes | {"BLOCK_N": 4}))
    model = build(kind)
    expected = greedy_by_generate(model, PROMPTS[:9], GREEDY)
    engine = decode_engine(model.to("cuda"), max_batch=6)
    assert drawn(engine, PROMPTS[:9], GREEDY).tokens == expected
    few = decode_engine(model, max_batch=6, max_kv_bytes=int(engine._runner.bytes_per_column * 40))
    assert drawn(few, PROMPTS[:9], GREEDY).tokens == expected
    assert few.describe()["captured"] and small_pages[1].num_preempted > 0
    assert small_pages[0].cache.pages is not None and card.launches["graph"] > 2 * len(recordings)


def test_a_group_holds_its_prompt_once(small_pages):
    """8 samples of 41 tokens, 40 of them in 10 pages, and at most 2 pages of 6 tokens more for each sample."""
    engine = decode_engine(build("llama"), max_batch=8)
    drawn(engine, [[5 + i % 80 for i in range(41)]] * 8, SamplingConfig(max_new_tokens=6, min_new_tokens=6))
    assert small_pages[0].cache.pages.most_used <= 10 + 8 * 2
    assert engine.kv_bytes <= (10 + 8 * 2 + 1) * 4 * COLUMN


@pytest.mark.parametrize(("max_batch", "columns"), [(6, None), (3, None), (6, 24 * 4), (2, 20 * 4)])
def test_turns_go_on_in_pages_and_without_them(max_batch, columns, small_pages):
    model = tiny_causal_lm().eval()
    rows, said = play(engine_of(model))
    again, logprobs = play(engine_of(model, max_batch=max_batch, max_kv_bytes=columns and columns * COLUMN), late=1)
    assert small_pages[-1].cache.pages is not None
    assert again == rows
    for a, b in zip(said, logprobs, strict=True):
        torch.testing.assert_close(torch.tensor([x for x in a if x is not None]),
                                   torch.tensor([x for x in b if x is not None]), atol=1e-4, rtol=1e-4)


def test_a_request_takes_the_pages_of_a_kept_one_where_nothing_else_has_any(small_pages):
    """Two samples of one prompt in pages for one: the first has ended, is kept, and nothing comes to go on."""
    engine = decode_engine(build("llama"), max_batch=3, max_kv_bytes=COLUMN * 4 * 4)
    prompt, sampling = [5, 6, 7, 8, 9], SamplingConfig(max_new_tokens=7, min_new_tokens=7)
    with engine.inference():
        turns = engine.open_turns(2, 12, sampling)
        requests = [Request(i, prompt, 7, seed=3, may_go_on=True) for i in range(2)]
        for request in requests:
            turns.submit(request)
        for _ in range(40):
            turns.step()
    assert small_pages[0].cache.pages.num_pages == 3 and [len(r.tokens) for r in requests] == [7, 7]


def test_a_server_takes_as_many_as_fit_and_reads_the_youngest_again(small_pages):
    model = build("llama")
    sampling = SamplingConfig(max_new_tokens=20, min_new_tokens=20)
    with HybridEngine(model, model, eos_ids=[2], max_kv_bytes=COLUMN * 4 * 22).inference() as engine:
        serving = engine.serve(8, 40)
        requests = [Request(i, MANY_PROMPTS[i], 20, seed=3, sampling=sampling) for i in range(16)]
        for request in requests:
            serving.submit(request)
        while serving.step():
            pass
    assert serving.num_slots == 8 and small_pages[0].num_preempted > 0
    with decode_engine(model).inference() as engine:
        alone = [engine.generate([r.prompt], sampling, 3, numbers=[r.number]).tokens[0] for r in requests]
    assert [r.tokens for r in requests] == alone
