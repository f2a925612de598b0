"""Scores of tokens in Triton against their definition in fp64, forward and backward, as in
tests/kernels/test_gpu_kernels.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from hybrid_rlhf import kernels
from hybrid_rlhf.algorithms.likelihood import token_logprobs
from hybrid_rlhf.kernels import cuda, reference
from tests.factories.token_scores import assert_as_in_wide_numbers
from tests.simulated_card import simulated_card

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (IS_INTERPRETED or torch.cuda.is_available()), reason="no card"),
              pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning")]
# Of a gradient, in its dtype; the interpreter cuts bf16 where cards round.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2.0 ** (-7 if IS_INTERPRETED else -8), torch.float16: 2.0**-10}
INF, NAN = float("inf"), float("nan")
each_dtype = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def logits_of(size, words, dtype, seed=0):
    """Rows of a wider tensor, far below zero, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(size, 3, words, generator=generator) - 60 * torch.rand(size, 1, 1, generator=generator)
    return logits.to(DEVICE, dtype)[:, 1], torch.randint(words, (size,), generator=generator).to(DEVICE)


def given(values):
    return torch.tensor(values, device=DEVICE)


def assert_right(ops, logits, targets, temperature, weights):
    assert_as_in_wide_numbers(ops.token_scores, logits, targets, temperature, weights, BOUNDS[logits.dtype])


@each_dtype
@pytest.mark.parametrize("words", [1, 5, 4096, 9001])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(0.3, -0.2), (0.3, None), (None, -0.2)])
def test_scores_and_their_gradients_are_those_of_wide_logits(ops, dtype, words, temperature, weights):
    assert_right(ops, *logits_of(5, words, dtype), temperature, weights)


@each_dtype
@pytest.mark.parametrize("words", [152_064, 256_001])
def test_vocabularies_of_todays_models_are_scored_in_one_pass(ops, dtype, words):
    assert_right(ops, *logits_of(2, words, dtype), 0.9, (1.0, 0.1))


@each_dtype
def test_a_row_that_rises_from_block_to_block_loses_nothing(ops, dtype):
    """The largest number comes last: all sums before it are scaled at every block, and from the least there is."""
    rising = torch.linspace(-8, 8, 12_300).expand(2, -1).clone()
    rising[1, :4096] = torch.finfo(dtype).min
    rising[1, 4096:4200] = -INF
    logits = rising.to(DEVICE, dtype)
    got = ops.token_scores(logits, given([12_299, 9000]), 1.0, True)
    want = reference.token_scores(logits.double(), given([12_299, 9000]), 1.0, True)
    assert all(torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5) for a, b in zip(got, want, strict=True))


def test_extremes_of_fp32_over_blocks_by_hand(ops):
    """Two words share the row; a block of numbers as low as there are stands before them."""
    logits = torch.full((1, 5000), -3e38, device=DEVICE)
    logits[0, 4500] = logits[0, 4600] = 3e38
    logprobs, entropy, correct = ops.token_scores(logits, given([4600]), 1.0, True)
    assert [logprobs.item(), entropy.item()] == pytest.approx([-0.6931472, 0.6931472])
    assert not correct.item()  # the first of the two is


def test_words_ruled_out_are_no_part_of_the_entropy_and_get_no_gradient_by_hand(ops):
    logits = given([[0.0, -INF, 0.0, 0.0]]).requires_grad_()  # 1/3 each of three words
    logprobs, entropy, correct = ops.token_scores(logits, given([0]), 1.0, True)
    assert logprobs.item() == pytest.approx(-1.0986123) and entropy.item() == pytest.approx(1.0986123)
    assert correct.tolist() == [True]
    gradient, = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    assert ops.token_scores(logits, given([1]), 1.0, False)[0].item() == -INF


@pytest.mark.parametrize("place", [2, 4100])
def test_rows_that_are_broken_are_as_broken_as_the_definition_says(ops, place):
    """Two NaN, an infinity, all ruled out; the target is what torch's argmax finds, then a word before or after it."""
    rows = torch.zeros(4, 5003, device=DEVICE)
    rows[0, place : place + 2], rows[1, place], rows[2, :], rows[3, place:] = NAN, INF, -INF, 1.0
    for targets in (given([place, place, 0, place]), given([0, 0, 1, 0]), given([place + 1] * 4)):
        leaves = [rows.clone().requires_grad_() for _ in range(2)]
        got, want = (f(x, targets, 1.0, True) for f, x in zip((ops.token_scores, reference.token_scores), leaves,
                                                              strict=True))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        gradients = [torch.autograd.grad(o[0].sum(), x)[0] for o, x in zip((got, want), leaves, strict=True)]
        torch.testing.assert_close(*gradients, equal_nan=True)


def test_ties_go_to_the_first_word_and_nothing_is_nothing(ops):
    tied = given([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]])
    assert ops.token_scores(tied, given([1, 2]), 1.0, False)[2].tolist() == [True, False]
    none = torch.empty(0, 7, device=DEVICE, requires_grad=True)
    scores = ops.token_scores(none, given([]).long(), 1.0, True)
    (scores[0].sum() + scores[1].sum()).backward()
    assert [x.shape for x in scores] == [(0,)] * 3 and none.grad.shape == (0, 7)


def test_columns_that_are_not_dense_and_rows_of_one_memory(ops):
    turned = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE).T
    for logits in (turned, turned[:1].expand(3, -1)):
        want = logits.log_softmax(-1)[:, 2]
        torch.testing.assert_close(ops.token_scores(logits, given([2, 2, 2]), 1.0, False)[0], want)
        assert_right(ops, logits, given([2, 9, 2, 9, 0])[::2], 1.0, (0.3, 0.2))


def test_a_target_that_is_no_word_is_none_and_reads_nothing_beside_the_row(ops):
    logits = torch.zeros(3, 4, device=DEVICE, requires_grad=True)
    logprobs, entropy, correct = ops.token_scores(logits, given([-1, 4, 3]), 1.0, True)
    logprobs.sum().backward()
    assert logprobs.isnan().tolist() == logits.grad.isnan().all(-1).tolist() == [True, True, False]
    assert entropy.isfinite().all() and not correct.any()


def test_in_chunks_they_are_torchs_own_and_nothing_is_kept_in_fp32(ops):
    """As training calls them: the gradients of head and hidden states, and the dtypes of all that a backward keeps."""
    hidden, targets = logits_of(9, 16, torch.bfloat16)[0].contiguous(), given([0, 5, 4999, 2, 2, 1, 0, 7, 8])
    weight = logits_of(5000, 16, torch.bfloat16, seed=1)[0].contiguous()

    def results(score_logits):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        logprobs, entropy, correct = token_logprobs(leaves[0], targets, lambda x: x @ leaves[1].T / 64, 0.8, 4, True,
                                                    score_logits=score_logits)
        (logprobs + 0.1 * entropy).sum().backward()
        return [logprobs, entropy, correct.float(), *(x.grad for x in leaves)]

    for got, want in zip(results(ops.token_scores), results(None), strict=True):
        assert (got.float() - want.float()).abs().max() <= 2.0**-6 * want.float().abs().max()
    kept = []
    logits = logits_of(4, 300, torch.bfloat16)[0].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.token_scores(logits, targets[:4].clamp(max=299), 1.0, True)
    assert sorted((str(t.dtype), t.numel()) for t in kept) == [
        ("torch.bfloat16", 1200), ("torch.float32", 4), ("torch.float32", 4), ("torch.int64", 4)]


@pytest.mark.skipif(not IS_INTERPRETED, reason="for machines without a card")
def test_on_a_card_they_are_compared_with_the_definition_before_they_are_given_out(monkeypatch, caplog):
    from hybrid_rlhf.kernels import triton_scores

    original = triton_scores.token_scores_backward
    with simulated_card(has_triton=True):
        assert kernels.ops_for("cuda").token_scores is not None and "log-probabilities" not in caplog.text
        before = torch.cuda.get_rng_state()
        assert cuda.why_not(kernels.ops_for("cuda").token_scores) is None
        assert torch.equal(torch.cuda.get_rng_state(), before)
        monkeypatch.setattr(triton_scores, "token_scores_backward", lambda *given: 1.1 * original(*given))
        kernels.ops_for.cache_clear()
        ops = kernels.ops_for("cuda")
        assert ops.token_scores is None and ops.fused is not None
        reason = "in float32 ours differ from their definition"
        assert f"log-probabilities are torch's ({reason})" in caplog.text and reason in ops.name

        def full(*_given):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

        monkeypatch.setattr(triton_scores, "token_scores_backward", full)
        kernels.ops_for.cache_clear()
        with pytest.raises(torch.OutOfMemoryError):
            kernels.ops_for("cuda")
