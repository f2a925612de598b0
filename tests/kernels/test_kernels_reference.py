"""The kernels' definition, against formulas written out by hand and against exact probabilities."""

import math

import pytest
import torch

from hybrid_rlhf.kernels import ops_for
from hybrid_rlhf.kernels.reference import decode_attention, exponentials, random_words, sample, splitmix64, truncated


def _caches(slots=5, heads=2, columns=12, dim=4, value_dim=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(slots, heads, columns, dim, generator=draw),
            torch.randn(slots, heads, columns, value_dim, generator=draw))


def in_pages(keys, values, slots, page):
    """The rows of these slots in pages of so many columns, and their pages."""
    pages = torch.randperm(len(slots) * (keys.shape[2] // page), generator=torch.Generator().manual_seed(2))
    pages = pages.view(len(slots), -1)
    caches = []
    for cache in (keys, values):
        cut = torch.zeros(pages.numel(), cache.shape[1], page, cache.shape[3])
        for row, slot in enumerate(slots.tolist()):
            for i, number in enumerate(pages[row].tolist()):
                cut[number] = cache[slot, :, i * page : (i + 1) * page]
        caches.append(cut)
    return *caches, pages


def test_decode_attention_over_pages_is_that_over_whole_rows():
    keys, values = _caches()
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(3, h, 1, d, generator=draw) for h, d in ((4, 4), (2, 4), (2, 6)))
    slots, positions = torch.tensor([4, 0, 2]), torch.tensor([11, -1, 3])
    for width, page in ((12, 4), (12, 3), (12, 12)):
        paged = in_pages(keys, values, slots, page)
        out = decode_attention(query, key, value, *paged, positions, width, scaling=0.4)
        whole = keys.clone(), values.clone()
        same = decode_attention(query, key, value, *whole, slots[:, None], positions, width, scaling=0.4)
        assert torch.equal(out, same) and not out[1].any()
        for ours, theirs in zip(paged[:2], whole, strict=True):
            assert torch.equal(ours[paged[2]].transpose(1, 2).flatten(2, 3), theirs[slots])


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}, {"mask": 3}],
                         ids=lambda o: next(iter(o), "plain"))
def test_decode_attention_equals_a_loop_over_rows_heads_and_columns(options):
    keys, values = _caches()
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(3, h, 1, d, generator=draw) for h, d in ((4, 4), (2, 4), (2, 6)))
    slots, positions = torch.tensor([4, 0, 2]), torch.tensor([7, 0, 3])
    window = options.pop("mask", None)
    named = dict(options)
    if window:
        columns = torch.arange(9)
        named["mask"] = columns > positions[:, None] - window
    before = keys.clone()
    out = decode_attention(query, key, value, keys, values, slots[:, None], positions, 9, scaling=0.4, **named)
    assert out.shape == (3, 1, 4, 6)
    for row, (slot, last) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        assert torch.equal(keys[slot, :, last], key[row, :, 0])
        assert torch.equal(values[slot, :, last], value[row, :, 0])
        for head in range(4):
            seen = [c for c in range(last + 1) if not window or c > last - window]
            scores = [float(query[row, head, 0] @ keys[slot, head // 2, c]) * 0.4 for c in seen]
            if "softcap" in options:
                scores = [1.5 * math.tanh(s / 1.5) for s in scores]
            weights = [math.exp(s) for s in scores]
            total = sum(weights) + (math.exp(options["sinks"][head]) if "sinks" in options else 0)
            expected = sum(w / total * values[slot, head // 2, c] for w, c in zip(weights, seen, strict=True))
            assert torch.allclose(out[row, 0, head], expected, atol=1e-5)
    untouched = torch.ones_like(keys, dtype=torch.bool)
    untouched[slots, :, positions] = False
    assert torch.equal(keys[untouched], before[untouched])


def test_an_idle_row_writes_nothing_and_gives_zeros():
    keys, values = _caches()
    before = keys.clone()
    query, key, value = torch.ones(1, 4, 1, 4), torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 6)
    out = decode_attention(query, key, value, keys, values, torch.tensor([[1]]), torch.tensor([-1]), 5, scaling=1.0)
    assert torch.equal(keys, before)
    assert not out.any()


def test_an_idle_row_may_name_the_slot_of_a_row_that_writes():
    keys, values = _caches()
    before = keys.clone()
    query, key, value = torch.ones(3, 4, 1, 4), torch.full((3, 2, 1, 4), 7.0), torch.ones(3, 2, 1, 6)
    pages, positions = torch.tensor([[2], [2], [2]]), torch.tensor([-1, 0, -1])
    decode_attention(query, key, value, keys, values, pages, positions, 5, scaling=1.0)
    assert (keys[2, :, 0] == 7).all() and torch.equal(keys[2, :, 1:], before[2, :, 1:])


def test_splitmix64_gives_the_published_sequence():
    """The first outputs of the generator seeded with 0 (Vigna's splitmix64.c): its state steps by the golden gamma."""
    golden, published = -7046029254386353131, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    states = torch.tensor([0, 1, 2]) * golden
    assert [x % 2**64 for x in splitmix64(states).tolist()] == published


def test_random_words_depend_on_the_row_s_own_counter_and_are_uniform():
    streams, positions = torch.arange(64), torch.arange(64) * 3
    words = random_words(streams, positions, 4096)
    assert torch.equal(random_words(streams[5:6], positions[5:6], 4096), words[5:6])
    assert words.min() >= 0 and words.max() < 2**32
    for shift in (0, 8, 16, 24):  # each byte of the words
        counts = torch.bincount((words >> shift & 255).flatten(), minlength=256).double()
        expected = words.numel() / 256
        assert abs(float(((counts - expected) ** 2 / expected).sum()) - 255) < 5 * (2 * 255) ** 0.5
    drawn = exponentials(words).double()
    assert abs(float(drawn.mean()) - 1) < 0.01 and abs(float(drawn.var()) - 1) < 0.03
    centred = words.double() - words.double().mean()
    for a, b in ((centred[:, :-1], centred[:, 1:]), (centred[:-1], centred[1:])):  # tokens side by side, rows likewise
        assert abs(float((a * b).mean() / centred.var())) < 0.01


@pytest.mark.parametrize("by", ["stream", "position"])
@pytest.mark.parametrize("settings", [dict(), dict(temperature=0.5), dict(top_k=4), dict(top_p=0.6), dict(min_p=0.2),
                                      dict(temperature=1.5, top_k=6, top_p=0.8, min_p=0.05)], ids=str)
def test_draws_follow_the_exact_probabilities(settings, by):
    num, logits = 20000, torch.tensor([1.0, -2.0, 0.5, 3.0, 2.2, -0.3, 1.7, 0.0, -1.0, 2.6])
    probs = [math.exp(x / settings.get("temperature", 1.0)) for x in logits.tolist()]
    order = sorted(range(10), key=lambda i: -probs[i])
    for i in order[settings.get("top_k") or 10:]:
        probs[i] = 0.0
    total, reached = sum(probs), 0.0
    for i in order:
        if reached >= settings.get("top_p", 1.0) * total - 1e-9:
            probs[i] = 0.0
        reached += probs[i]
    probs = torch.tensor([p if p >= settings.get("min_p", 0) * max(probs) else 0.0 for p in probs]).double()
    expected = probs / probs.sum() * num
    counters = (torch.arange(num), torch.full((num,), 7))
    tokens, logprobs = sample(logits.expand(num, -1), *(counters if by == "stream" else counters[::-1]), **settings)
    counts = torch.bincount(tokens, minlength=10).double()
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5 + 4
    policy = (logits / settings.get("temperature", 1.0)).log_softmax(0)
    assert torch.allclose(logprobs, policy[tokens], atol=1e-6)  # before anything was cut


def test_greedy_penalty_and_forbidden_tokens():
    logits = torch.tensor([[2.0, 1.9, -1.0], [-2.0, -1.5, -1.4]])
    zeros = torch.zeros(2, dtype=torch.long)
    seen = torch.tensor([[True, False, False], [False, False, True]])
    assert sample(logits, zeros, zeros, temperature=0)[0].tolist() == [0, 2]
    penalised, logprobs = sample(logits, zeros, zeros, temperature=0, repetition_penalty=1.2, seen=seen)
    assert penalised.tolist() == [1, 1]  # 2 / 1.2 < 1.9 and -1.4 * 1.2 < -1.5
    assert torch.allclose(logprobs, logits.log_softmax(-1)[:, 1])
    assert sample(logits, zeros, zeros, temperature=0, forbidden=seen)[0].tolist() == [1, 1]


def test_top_k_keeps_ties_and_top_p_always_the_likeliest():
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert truncated(scores, top_k=1).isfinite().tolist() == [[False, True, True, False]]
    assert int(truncated(torch.tensor([[5.0, 1.0, 0.0]]), top_p=0.01).isfinite().sum()) == 1


def test_a_device_without_kernels_says_so_in_the_name_of_its_operations(caplog):
    ops = ops_for("meta")
    assert ops.name.startswith("reference (no kernels for meta")
    assert "the torch reference is used" in caplog.text
