"""The tokens that truncated sampling draws from, as the kernels of the processor say them beside the draw."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybrid_rlhf.kernels import REFERENCE, ops_for
from tests.factories.warpers import warped

SETTINGS = [{}, dict(temperature=0.7), dict(top_k=5), dict(top_k=600), dict(top_p=0.9), dict(top_p=0.999),
            dict(top_p=0.013), dict(min_p=0.1), dict(top_p=0.7, min_p=0.05),
            dict(top_k=20, top_p=0.8, min_p=0.01, temperature=1.3), dict(repetition_penalty=1.3, top_k=9)]


@pytest.fixture(params=["cpu", "reference"])
def ops(request):
    return ops_for("cpu") if request.param == "cpu" else REFERENCE


def case(num_tokens, rows=12, spread=3.0):
    g = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn(rows, num_tokens, generator=g) * spread
    return logits, torch.randint(-(2**62), 2**62, (rows,), generator=g), torch.arange(rows)


def only_rounding_differs(ours, theirs, logits, top_p):
    """Whether two sets differ by tokens alone before which stands a mass of top_p, to a millionth."""
    probs, order = logits.double().softmax(-1).sort(-1, descending=True)
    before = torch.empty_like(probs).scatter_(-1, order, probs.cumsum(-1) - probs)
    return bool(((before - top_p).abs()[ours != theirs] < 1e-6).all())


@pytest.mark.parametrize("settings", SETTINGS[:-1], ids=str)
def test_the_kept_tokens_are_those_of_transformers_warpers(ops, settings):
    for num_tokens in (7, 300, 5003):
        logits, streams, positions = case(num_tokens)
        kept = torch.empty(12, num_tokens, dtype=torch.bool)
        tokens, logprobs = ops.sample(logits, streams, positions, **settings, kept=kept)
        want = warped(logits, **settings)
        is_equal = torch.equal(kept, want > float("-inf"))
        assert is_equal or only_rounding_differs(kept, want > float("-inf"), logits, settings["top_p"])
        if not is_equal:
            want = logits.masked_fill(~kept, float("-inf"))
        assert torch.allclose(logprobs, want.log_softmax(-1).gather(-1, tokens[:, None])[:, 0], atol=3e-6, rtol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_drawn_token_is_kept_and_is_the_one_drawn_without_asking(ops, settings):
    """Ties (spread 0) and neighbours a rounding apart included: the set is the sampler's own."""
    for num_tokens, spread, forbids in itertools.product((7, 300, 5003), (0.0, 1e-6, 0.5, 3.0), (False, True)):
        logits, streams, positions = case(num_tokens, 64, spread)
        more = settings | ({"seen": logits > 0.1} if "repetition_penalty" in settings else {})
        if forbids:
            more["forbidden"] = torch.zeros(64, num_tokens, dtype=torch.bool)
            more["forbidden"][:, ::3] = True
        kept = torch.empty(64, num_tokens, dtype=torch.bool)
        tokens, logprobs = ops.sample(logits, streams, positions, **more, kept=kept)
        assert torch.equal(tokens, ops.sample(logits, streams, positions, **more)[0])
        assert kept.gather(1, tokens[:, None]).all()
        assert not forbids or not kept[:, ::3].any()
        among = (logits / settings.get("temperature", 1.0)).masked_fill(~kept, float("-inf")).double()
        want = among.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(logprobs.double(), want, atol=3e-6, rtol=0)


def test_by_hand(ops):
    """Of probabilities 1/2, 1/4, 1/8, 1/8 top_p 0.7 keeps two: 2/3 and 1/3 are left; top_k 2 with token 0 forbidden
    keeps tokens 1 and 2 (or the equal 3): of 1/4, 1/8, 1/8."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(200, 4)
    streams, kept = torch.arange(200), torch.empty(200, 4, dtype=torch.bool)
    tokens, logprobs = ops.sample(logits, streams, streams, top_p=0.7, kept=kept)
    assert kept.tolist() == [[True, True, False, False]] * 200 and set(tokens.tolist()) == {0, 1}
    assert torch.allclose(logprobs.exp(), torch.tensor([2 / 3, 1 / 3])[tokens])
    forbidden = torch.tensor([[True, False, False, False]]).expand(200, 4)
    tokens, logprobs = ops.sample(logits, streams, streams, top_k=2, forbidden=forbidden, kept=kept)
    assert kept.tolist() == [[False, True, True, True]] * 200
    assert torch.allclose(logprobs.exp(), torch.tensor([0, 1 / 2, 1 / 4, 1 / 4])[tokens])


def test_broken_logits_are_noticed_still(ops):
    logits, numbers = torch.randn(4, 50), torch.arange(4)
    logits[0, 7], logits[1, 7], logits[2] = float("nan"), float("inf"), float("-inf")
    kept = torch.empty(4, 50, dtype=torch.bool)
    tokens, logprobs = ops.sample(logits, numbers, numbers, top_k=3, kept=kept)
    assert tokens[:3].tolist() == [0, 0, 0] and logprobs.isfinite().tolist() == [False, False, False, True]


def test_a_buffer_that_does_not_fit_is_refused():
    logits, numbers = torch.randn(4, 50), torch.arange(4)
    wide = torch.empty(4, 80, dtype=torch.bool)
    for kept in (wide[:, :49].contiguous(), torch.empty(4, 50), wide[:, :50]):
        with pytest.raises(ValueError, match="kept"):
            ops_for("cpu").sample(logits, numbers, numbers, top_k=3, kept=kept)
