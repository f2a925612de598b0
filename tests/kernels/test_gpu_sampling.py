"""Sampling in Triton against its definition in torch, as in tests/kernels/test_gpu_kernels.py."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rlhf.kernels import reference

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
HAS_DEVICE = IS_INTERPRETED or torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="no card"),
              pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
              pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning")]
SIZES = (5003,) if IS_INTERPRETED else (1, 7, 300, 5003, 50257, 256000)  # three chunks, two blocks and a rest
SETTINGS = [{}, dict(temperature=0.0), dict(temperature=0.7), dict(top_k=5), dict(top_k=600), dict(top_p=0.9),
            dict(top_p=0.999), dict(top_p=0.013), dict(min_p=0.1), dict(top_p=0.7, min_p=0.05),
            dict(top_k=20, top_p=0.8, min_p=0.01, temperature=1.3), dict(repetition_penalty=1.3),
            dict(repetition_penalty=1.3, temperature=0.0, top_k=3)]


def numbers(count):
    return torch.arange(count, device=DEVICE)


def request(num_tokens, spread, forbids, settings, dtype=torch.float32, rows=8):
    """(logits, streams, positions), options: seeded, logits a view of a wider tensor. Spread 0: all tokens tie."""
    g = torch.Generator().manual_seed(num_tokens)
    logits = (torch.randn(rows, 2, num_tokens, generator=g) * spread).to(DEVICE, dtype)[:, -1]
    streams = torch.randint(-(2**62), 2**62, (rows,), generator=g).to(DEVICE)
    more = dict(settings)
    if "repetition_penalty" in settings:
        more["seen"] = (torch.rand(rows + 1, num_tokens + 3, generator=g) < 0.3).to(DEVICE)[:rows, :num_tokens]
    if forbids:
        more["forbidden"] = (torch.rand(rows, num_tokens, generator=g) < 0.2).to(DEVICE)
    return (logits, streams, numbers(rows) * 1000003), more


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_sampling_draws_the_definitions_tokens(ops, settings):
    kinds = [(3.0, False, torch.float32), (0.0, True, torch.float32), (0.5, True, torch.bfloat16)]
    for num_tokens, (spread, forbids, dtype) in itertools.product(SIZES, kinds[1:] if IS_INTERPRETED else kinds):
        drawn, more = request(num_tokens, spread, forbids, settings, dtype, rows=2 if IS_INTERPRETED else 33)
        tokens, logprobs = ops.sample(*drawn, **more)
        want, want_logprobs = reference.sample(*drawn, **more)
        # on a card the definition itself sums in another order: the last token that top-p keeps may differ there
        assert int((tokens != want).sum()) <= (0 if IS_INTERPRETED or "top_p" not in settings else 1), more
        agree = tokens == want
        assert torch.allclose(logprobs[agree], want_logprobs[agree], atol=4e-6, rtol=0)
        assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)


class Operations(TorchDispatchMode):
    """The names of torch's operations that run in it."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("settings", SETTINGS[3:11], ids=str)
def test_the_kept_tokens_are_the_definitions_and_the_draw_is_from_them(ops, settings):
    """In bf16 many tokens score the same. No sort: torch makes the kernels' buffers and does nothing else."""
    for num_tokens, (forbids, dtype) in itertools.product(SIZES[-3:], ((False, torch.float32), (True, torch.bfloat16))):
        drawn, more = request(num_tokens, 3.0, forbids, settings, dtype, rows=2 if IS_INTERPRETED else 33)
        ours, theirs = torch.empty(2, len(drawn[0]), num_tokens, dtype=torch.bool, device=DEVICE)
        with Operations() as operations:
            tokens, logprobs = ops.sample(*drawn, **more, kept=ours)
        assert IS_INTERPRETED or operations.names <= {"new_empty", "empty_like"}
        assert not operations.names & {"sort", "topk", "cumsum"}
        want, want_logprobs = reference.sample(*drawn, **more, kept=theirs)
        before = mass_before(reference.allowed_scores(drawn[0], **more | dict(top_p=1.0, min_p=0.0)))
        # the definition's sums, and so the last tokens of a mass that rounding may move over the bound, may be others
        assert ((ours == theirs) | ((before - more.get("top_p", 2.0)).abs() < 1e-6)).all()
        same = (ours == theirs).all(1)
        assert torch.equal(tokens[same], want[same])
        assert torch.allclose(logprobs[same], want_logprobs[same], atol=4e-6, rtol=0)
        assert same.all() or ("top_p" in settings and not IS_INTERPRETED)


def mass_before(scores):
    """Of each token, the probability of all that rank above it."""
    probs, order = scores.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    return torch.empty_like(probs).scatter_(-1, order, probs.cumsum(-1) - probs)


@pytest.mark.parametrize("settings", [dict(top_k=8), dict(top_p=0.9), dict(top_k=8, top_p=0.9)], ids=str)
def test_the_least_number_is_a_score_as_any_other(ops, settings):
    """Some models write it in place of minus infinity; fewer than top-k others are left, or none."""
    logits = torch.full((3, 20), torch.finfo(torch.float32).min, device=DEVICE)
    logits[0, :5], logits[1, 7] = numbers(5) / 2, 0.0
    ours, theirs = torch.empty(2, 3, 20, dtype=torch.bool, device=DEVICE)
    tokens, _ = ops.sample(logits, numbers(3), numbers(3), **settings, kept=ours)
    want, _ = reference.sample(logits, numbers(3), numbers(3), **settings, kept=theirs)
    assert torch.equal(ours, theirs) and torch.equal(tokens, want)


def test_what_scores_the_floor_of_min_p_stays_where_top_p_reaches_further(ops):
    """Masses 2 of what min-p keeps and 1.2e-4 of each of the first two, of which top-p .9999 keeps one."""
    logits = torch.tensor([[-9, -9, 0, 0.5, 0.5]], device=DEVICE)
    logits[0, 3:] = torch.tensor(0.5).log()
    kept = torch.empty(1, 5, dtype=torch.bool, device=DEVICE)
    ops.sample(logits, numbers(1), numbers(1), top_p=0.9999, kept=kept)
    assert kept.tolist() == [[True, False, True, True, True]]
    ops.sample(logits, numbers(1), numbers(1), top_p=0.9999, min_p=0.5, kept=kept)
    assert kept.tolist() == [[False, False, True, True, True]]


def test_the_random_words_are_the_definitions_to_the_bit(ops):
    """Logits that undo the noise of the definition but for a token a row: only the same noise leaves it the best."""
    rows, num_tokens = (4 if IS_INTERPRETED else 16), 1000
    streams, positions = numbers(rows) * 7919 - 40000, numbers(rows) * 2654435761
    noise = reference.exponentials(reference.random_words(streams, positions, num_tokens)).log()
    chosen = torch.randint(num_tokens, (rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits = noise.scatter_add(1, chosen[:, None], torch.full((rows, 1), 1e-4, device=DEVICE))
    assert torch.equal(ops.sample(logits, streams, positions)[0], chosen)


def test_log_probabilities_are_exact_to_a_few_millionths(ops):
    logits = torch.randn(4, 50257, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 4
    tokens, logprobs = ops.sample(logits, numbers(4), numbers(4))
    want = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert (logprobs - want).abs().max() < 4e-6


KEPT = [(dict(), 10), (dict(top_k=4), 4), (dict(top_p=0.75), 6), (dict(min_p=0.55), 5), (dict(top_k=6, top_p=0.62), 4)]


@pytest.mark.parametrize("settings, kept", KEPT[-1:] if IS_INTERPRETED else KEPT, ids=str)
def test_draws_follow_the_exact_distribution(ops, settings, kept):
    """Draws over ten tokens of probability proportional to 1..10; what is kept is counted by hand."""
    draws = 50 if IS_INTERPRETED else 20000
    streams = numbers(draws) + 77
    tokens, _ = ops.sample(torch.arange(1.0, 11.0, device=DEVICE).log().expand(draws, 10), streams,
                           torch.zeros_like(streams), **settings)
    weights = torch.arange(1.0, 11.0)
    weights[: 10 - kept] = 0
    expected = draws * weights / weights.sum()
    counts = tokens.cpu().bincount(minlength=10).float()
    assert not counts[: 10 - kept].any()
    statistic = ((counts - expected) ** 2 / expected)[10 - kept:].sum().item()
    assert statistic < kept - 1 + 4 * (2 * (kept - 1)) ** 0.5 + 4


@pytest.mark.parametrize("settings", [{}, dict(temperature=0.0), dict(top_k=3), dict(top_p=0.5), dict(min_p=0.5),
                                      dict(top_k=3, top_p=0.5)], ids=str)
def test_broken_rows_give_token_zero_and_nan_and_minus_infinity_is_never_drawn(ops, settings):
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, :] = float("-inf")
    logits[3, 11] = 0.0
    for kept in (None, torch.empty(5, 50, dtype=torch.bool, device=DEVICE)):
        tokens, logprobs = ops.sample(logits.to(DEVICE), numbers(5), numbers(5), **settings, kept=kept)
        assert tokens[:4].tolist() == [0, 0, 0, 11]
        assert logprobs.isnan().tolist() == [True, True, True, False, False]
    assert kept[3].nonzero().tolist() == [[11]] and logprobs[3] == 0


def test_a_row_in_which_everything_is_forbidden_gives_the_first_token(ops):
    forbidden = torch.ones(2, 50, dtype=torch.bool, device=DEVICE)
    for settings in ({}, dict(top_k=3, top_p=0.5), dict(temperature=0.0)):
        tokens, logprobs = ops.sample(torch.zeros(2, 50, device=DEVICE), numbers(2), numbers(2), forbidden=forbidden,
                                      **settings)
        assert tokens.tolist() == [0, 0] and logprobs.isfinite().all()


def test_a_draw_does_not_depend_on_the_rest_of_the_batch(ops):
    logits = torch.randn(9, 2100, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for settings in ({}, dict(top_p=0.9)):
        tokens, logprobs = ops.sample(logits, numbers(9) * 1001, numbers(9), **settings)
        for i in (4,) if IS_INTERPRETED else range(9):
            token, logprob = ops.sample(logits[i:i + 1], numbers(9)[i:i + 1] * 1001, numbers(9)[i:i + 1], **settings)
            assert token[0] == tokens[i] and logprob[0] == logprobs[i]
