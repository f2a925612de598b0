"""The C++ kernels against their definition in torch, against numbers by hand, and in use."""

from __future__ import annotations

import itertools
import math
import shutil

import pytest
import torch

from hybrid_rlhf.kernels import REFERENCE, cpu, ops_for, reference
from tests.factories.warpers import warped

# Largest difference from the definition for outputs of size about 1: both sum in fp32, and round once to the dtype.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = [(4, 2, 8, 8), (12, 12, 64, 64), (6, 2, 32, 32), (8, 1, 48, 40), (7, 1, 128, 96), (5, 5, 5, 3),
          (16, 2, 80, 80)]


@pytest.fixture(scope="module")
def ops():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    return cpu.load()


@pytest.fixture(params=["cpu", "reference"])
def either(request):
    return ops_for("cpu") if request.param == "cpu" else REFERENCE


def case(heads, kv_heads, dim, value_dim, dtype, positions, page=None, columns=0, seed=0):
    """Positional arguments of decode_attention: random tokens and caches for rows at the given positions. page: its
    columns; None: a page holds all of a row."""
    g = torch.Generator().manual_seed(seed)
    batch, width = len(positions), max(positions) + 1
    columns = columns or width + 5
    per_row = 1 if page is None else -(-columns // page)
    num_pages, columns = batch * per_row + 2, page or columns

    def draw(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    pages = torch.randperm(num_pages, generator=g)[:-2].view(batch, per_row)
    query = draw(batch, 1, heads, dim).transpose(1, 2)  # as models make it: not contiguous
    return [query, draw(batch, kv_heads, 1, dim), draw(batch, kv_heads, 1, value_dim),
            draw(num_pages, kv_heads, columns, dim), draw(num_pages, kv_heads, columns, value_dim),
            pages, torch.tensor(positions), width]


def both(ops, inputs, **settings):
    """(ours, the definition's) results; asserts that both left the same caches behind."""
    mine = [x.clone() if i in (3, 4) else x for i, x in enumerate(inputs)]
    theirs = [x.clone() if i in (3, 4) else x for i, x in enumerate(inputs)]
    settings.setdefault("scaling", inputs[0].shape[-1] ** -0.5)
    ours, want = ops.decode_attention(*mine, **settings), reference.decode_attention(*theirs, **settings)
    assert torch.equal(mine[3], theirs[3]) and torch.equal(mine[4], theirs[4])
    assert ours.dtype == want.dtype and ours.shape == want.shape and ours.is_contiguous()
    return ours.float(), want.float()


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_the_definitions_for_every_option(ops, shape, dtype):
    positions = [0, 3, -1, 40, 132, 17, 63, 64, 65]
    for masked, has_sinks, softcap, page in itertools.product((False, True), (False, True), (None, 5.0), (None, 16)):
        inputs = case(*shape, dtype, positions, page)
        g = torch.Generator().manual_seed(1)
        mask = torch.rand(len(positions), inputs[-1], generator=g) < 0.7 if masked else None
        sinks = torch.randn(shape[0], generator=g) if has_sinks else None
        ours, want = both(ops, inputs, mask=mask, sinks=sinks, softcap=softcap)
        assert (ours - want).abs().max() < BOUNDS[dtype]
        assert not ours[2].any()  # the idle row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_right_at_every_length_from_one_on(ops, dtype):
    for length in range(1, 70):
        ours, want = both(ops, case(4, 2, 16, 16, dtype, [length - 1], seed=length))
        assert (ours - want).abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_change_no_bit(ops, shape, dtype):
    """Rows in pages of 24 columns that two rows begin with together, and the same rows whole."""
    query, key, value, keys, values, pages, positions, width = case(*shape, dtype, [70, 100, 3], 24)
    pages[1, :2] = pages[0, :2]
    whole = [cache[pages].transpose(1, 2).flatten(2, 3).contiguous() for cache in (keys, values)]
    window = torch.arange(width) > positions[:, None] - 30
    for mask in (None, window):
        out = ops.decode_attention(query, key, value, keys, values, pages, positions, width, scaling=0.3, mask=mask)
        same = ops.decode_attention(query, key, value, *whole, torch.arange(3)[:, None], positions, width, scaling=0.3,
                                    mask=mask)
        assert torch.equal(out, same)
    assert torch.equal(keys[pages[0, 2], :, 22], key[0, :, 0])
    assert torch.equal(values[pages[1, 4], :, 4], value[1, :, 0])


def test_attention_of_two_columns_by_hand(ops):
    """Scores 0 and ln 3 give weights 1/4 and 3/4 of values 4 and 8; with a sink of ln 4, 1/8 and 3/8."""
    keys, values = torch.zeros(1, 1, 2, 1), torch.tensor([[[[4.0], [0.0]]]])
    one = torch.ones(1, 1, 1, 1)
    new = dict(key=one * math.log(3), value=one * 8, keys=keys, values=values, pages=torch.tensor([[0]]),
               positions=torch.tensor([1]), width=2)
    assert ops.decode_attention(one, **new, scaling=1.0).item() == pytest.approx(7.0)
    assert ops.decode_attention(one, **new, scaling=1.0, sinks=torch.tensor([math.log(4)])).item() == pytest.approx(3.5)
    assert keys.flatten().tolist() == pytest.approx([0, math.log(3)]) and values.flatten().tolist() == [4, 8]


def test_a_sliding_window_reads_its_columns_only(ops):
    inputs = case(4, 2, 16, 16, torch.float32, [50, 9, 3])
    columns = torch.arange(inputs[-1])
    window = columns > inputs[6][:, None] - 8
    inputs[3][inputs[5][0], :, :43] = float("nan")  # outside the first row's window: reading them would show
    inputs[4][inputs[5][0], :, :43] = float("nan")
    assert ops.decode_attention(*inputs, scaling=0.25, mask=window).isfinite().all()
    ours, want = both(ops, case(4, 2, 16, 16, torch.float32, [50, 9, 3]), mask=window)
    assert (ours - want).abs().max() < 5e-6


def test_a_row_that_may_read_nothing_gives_zeros(either):
    for sinks in (None, torch.ones(4)):
        nothing = torch.zeros(2, 7, dtype=torch.bool)
        ours, want = both(either, case(4, 2, 16, 16, torch.float32, [5, 6]), mask=nothing, sinks=sinks)
        assert not ours.any() and not want.any()


def test_a_broken_number_in_a_key_reaches_the_output(either):
    inputs = case(2, 2, 16, 16, torch.float32, [5])
    inputs[3][inputs[5][0], 0, 2, 3] = float("nan")
    out = either.decode_attention(*inputs, scaling=0.25)[0, 0]
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_caches_and_new_tokens_may_be_views_with_any_strides(ops):
    inputs = case(4, 2, 16, 16, torch.float32, [11, 30, 2])
    inputs[3] = inputs[3].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)  # (S, K, C, D) stored as (C, S, K, D)
    inputs[0] = inputs[0].mT.contiguous().mT
    inputs[1] = inputs[1].expand(-1, -1, 2, -1).transpose(2, 3).contiguous().mT[:, :, :1]
    assert inputs[1].stride(-1) != 1
    ours, want = both(ops, inputs)
    assert (ours - want).abs().max() < 5e-6


def test_query_key_and_value_may_differ_in_dtype(ops):
    inputs = case(4, 2, 16, 16, torch.float32, [11, 30, 2])
    inputs[2], inputs[4] = inputs[2].bfloat16(), inputs[4].bfloat16()
    inputs[0], inputs[1] = inputs[0].half(), inputs[1].half()
    ours, want = both(ops, inputs)
    assert (ours - want).abs().max() < 2e-3


def test_the_number_of_threads_changes_no_bit(ops):
    inputs = case(12, 4, 64, 64, torch.bfloat16, [100 + i for i in range(8)])
    logits, streams = torch.randn(8, 5000), torch.arange(8)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((ops.decode_attention(*inputs, scaling=0.125), *ops.sample(logits, streams, streams)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_what_would_read_outside_the_pages_is_an_error(ops):
    good = case(4, 2, 16, 16, torch.float32, [11, 30, 2])
    for at, wrong, named in ((6, torch.tensor([11, 31, 2]), "position 31"), (7, 60, "width is 60"),
                             (5, torch.tensor([[0], [5], [1]]), "page 5 of 5"),
                             (5, torch.tensor([0, 4, 1]), "pages must be"), (2, torch.zeros(3, 3, 1, 16), "shapes"),
                             (3, good[3].double(), "float64|double|Double"), (6, torch.tensor([1, 2]), "int64")):
        with pytest.raises((IndexError, ValueError, TypeError), match=named):
            ops.decode_attention(*[wrong if i == at else x for i, x in enumerate(good)], scaling=0.25)


SETTINGS = [{}, dict(temperature=0.0), dict(temperature=0.7), dict(top_k=5), dict(top_k=600), dict(top_p=0.9),
            dict(top_p=0.999), dict(top_p=0.013), dict(min_p=0.1), dict(top_p=0.7, min_p=0.05),
            dict(top_k=20, top_p=0.8, min_p=0.01, temperature=1.3), dict(repetition_penalty=1.3),
            dict(repetition_penalty=1.3, temperature=0.0)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampling_draws_the_definitions_tokens(ops, settings, dtype):
    for num_tokens, spread, forbids in itertools.product((1, 7, 300, 5003), (0.0, 0.5, 3.0), (False, True)):
        g = torch.Generator().manual_seed(num_tokens)
        logits = (torch.randn(12, num_tokens, generator=g) * spread).to(dtype)  # spread 0: all tokens tie
        streams, positions = torch.randint(-(2**62), 2**62, (12,), generator=g), torch.arange(12)
        more = dict(settings)
        if "repetition_penalty" in settings:
            more["seen"] = torch.rand(12, num_tokens, generator=g) < 0.3
        if forbids:
            more["forbidden"] = torch.rand(12, num_tokens, generator=g) < 0.2
        tokens, logprobs = ops.sample(logits, streams, positions, **more)
        want, want_logprobs = reference.sample(logits, streams, positions, **more)
        assert tokens.tolist() == want.tolist()
        assert torch.allclose(logprobs, want_logprobs, atol=2e-6, rtol=0)


def test_log_probabilities_are_exact_to_a_millionth(ops):
    logits = torch.randn(4, 50257, generator=torch.Generator().manual_seed(0)) * 4
    tokens, logprobs = ops.sample(logits, torch.arange(4), torch.arange(4))
    want = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (logprobs - want).abs().max() < 2e-6


@pytest.mark.parametrize("settings", [{}, dict(temperature=0.0), dict(top_k=3), dict(top_p=0.5)], ids=str)
def test_broken_logits_give_token_zero_and_no_finite_logprob(either, settings):
    logits, numbers = torch.randn(4, 50), torch.arange(4)
    logits[0, 7], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    for more in ({}, {"kept": torch.empty(4, 50, dtype=torch.bool)} if "top_k" in settings else {}):
        tokens, logprobs = either.sample(logits, numbers, numbers, **settings, **more)
        assert tokens[:3].tolist() == [0, 0, 0]
        assert logprobs.isfinite().tolist() == [False, False, False, True]


def test_tokens_of_minus_infinity_are_never_drawn(ops):
    logits = torch.full((64, 40), float("-inf"))
    logits[:, 11], logits[:, 30] = 0.0, 1.0
    numbers = torch.arange(64)
    for settings in ({}, dict(top_k=5), dict(top_p=0.99), dict(temperature=0.0)):
        assert set(ops.sample(logits, numbers, numbers, **settings)[0].tolist()) <= {11, 30}


# -- the tokens that truncated sampling draws from, as the kernels of the processor say them beside the draw ----------


CUTS = [{}, dict(temperature=0.7), dict(top_k=5), dict(top_k=600), dict(top_p=0.9), dict(top_p=0.999),
            dict(top_p=0.013), dict(min_p=0.1), dict(top_p=0.7, min_p=0.05),
            dict(top_k=20, top_p=0.8, min_p=0.01, temperature=1.3), dict(repetition_penalty=1.3, top_k=9)]


def logits_case(num_tokens, rows=12, spread=3.0):
    g = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(rows, num_tokens, generator=g) * spread
    return logits, torch.randint(-(2**62), 2**62, (rows,), generator=g), torch.arange(rows)


def only_rounding_differs(ours, theirs, logits, top_p):
    """Whether two sets differ by tokens alone before which stands a mass of top_p, to a millionth."""
    probs, order = logits.double().softmax(-1).sort(-1, descending=True)
    before = torch.empty_like(probs).scatter_(-1, order, probs.cumsum(-1) - probs)
    return bool(((before - top_p).abs()[ours != theirs] < 1e-6).all())


@pytest.mark.parametrize("settings", CUTS[:-1], ids=str)
def test_the_kept_tokens_are_those_of_transformers_warpers(either, settings):
    for num_tokens in (7, 300, 5003):
        logits, streams, positions = logits_case(num_tokens)
        kept = torch.empty(12, num_tokens, dtype=torch.bool)
        tokens, logprobs = either.sample(logits, streams, positions, **settings, kept=kept)
        want = warped(logits, **settings)
        is_equal = torch.equal(kept, want > float("-inf"))
        assert is_equal or only_rounding_differs(kept, want > float("-inf"), logits, settings["top_p"])
        if not is_equal:
            want = logits.masked_fill(~kept, float("-inf"))
        assert torch.allclose(logprobs, want.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], atol=3e-6, rtol=0)


@pytest.mark.parametrize("settings", CUTS, ids=str)
def test_the_drawn_token_is_kept_and_is_the_one_drawn_without_asking(either, settings):
    """Ties (spread 0) and neighbours a rounding apart included: the set is the sampler's own."""
    for num_tokens, spread, forbids in itertools.product((7, 5003), (0.0, 1e-6, 3.0), (False, True)):
        logits, streams, positions = logits_case(num_tokens, 64, spread)
        more = settings | ({"seen": logits > 0.1} if "repetition_penalty" in settings else {})
        if forbids:
            more["forbidden"] = torch.zeros(64, num_tokens, dtype=torch.bool)
            more["forbidden"][:, ::3] = True
        kept = torch.empty(64, num_tokens, dtype=torch.bool)
        tokens, logprobs = either.sample(logits, streams, positions, **more, kept=kept)
        assert torch.equal(tokens, either.sample(logits, streams, positions, **more)[0])
        assert kept.gather(1, tokens[:, None]).all()
        assert not forbids or not kept[:, ::3].any()
        among = (logits / settings.get("temperature", 1.0)).masked_fill(~kept, float("-inf")).double()
        want = among.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(logprobs.double(), want, atol=3e-6, rtol=0)


def test_kept_sets_by_hand(either):
    """Of probabilities 1/2, 1/4, 1/8, 1/8 top_p 0.7 keeps two: 2/3 and 1/3 are left; top_k 2 with token 0 forbidden
    keeps tokens 1 and 2 (or the equal 3): of 1/4, 1/8, 1/8."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(200, 4)
    streams, kept = torch.arange(200), torch.empty(200, 4, dtype=torch.bool)
    tokens, logprobs = either.sample(logits, streams, streams, top_p=0.7, kept=kept)
    assert kept.tolist() == [[True, True, False, False]] * 200 and set(tokens.tolist()) == {0, 1}
    assert torch.allclose(logprobs.exp(), torch.tensor([2 / 3, 1 / 3])[tokens])
    forbidden = torch.tensor([[True, False, False, False]]).expand(200, 4)
    tokens, logprobs = either.sample(logits, streams, streams, top_k=2, forbidden=forbidden, kept=kept)
    assert kept.tolist() == [[False, True, True, True]] * 200
    assert torch.allclose(logprobs.exp(), torch.tensor([0, 1 / 2, 1 / 4, 1 / 4])[tokens])


def test_a_buffer_that_does_not_fit_is_refused():
    logits, numbers = torch.randn(4, 50), torch.arange(4)
    wide = torch.empty(4, 80, dtype=torch.bool)
    for kept in (wide[:, :49].contiguous(), torch.empty(4, 50), wide[:, :50]):
        with pytest.raises(ValueError, match="kept"):
            ops_for("cpu").sample(logits, numbers, numbers, top_k=3, kept=kept)
