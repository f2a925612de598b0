"""Chunked log-probabilities against the whole computation, written out with torch's own cross entropy."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from hybrid_rlhf.algorithms import likelihood
from hybrid_rlhf.algorithms.divergence import top_k_logprobs
from hybrid_rlhf.algorithms.likelihood import chunk_rows, imitation_loss, token_logprobs, token_logprobs_and
from hybrid_rlhf.core.tensors import KeptSets, SequenceBatch, length_mask, predicted, predicting
from hybrid_rlhf.kernels import ops_for

HIDDEN, VOCABULARY = 5, 11


def problem(size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(size, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (size,), generator=generator)


def test_three_words_by_hand():
    # logits 0, log 2, log 5: probabilities 1/8, 2/8, 5/8
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().repeat(3, 1)
    logprobs, entropy, correct = token_logprobs(logits, torch.tensor([0, 1, 2]), lambda h: h, with_entropy=True)
    torch.testing.assert_close(logprobs, torch.tensor([1 / 8, 2 / 8, 5 / 8]).log())
    by_hand = (math.log(8) + 2 * math.log(4) + 5 * math.log(8 / 5)) / 8
    torch.testing.assert_close(entropy, torch.full((3,), by_hand))
    assert correct.tolist() == [False, False, True]


def test_temperature_divides_the_logits():
    # logits 0, log 2, log 5 over 1/2: 0, log 4, log 25: probabilities 1/30, 4/30, 25/30
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    logprobs, entropy, _ = token_logprobs(logits, torch.tensor([1]), lambda h: h, temperature=0.5, with_entropy=True)
    assert float(logprobs) == pytest.approx(math.log(4 / 30), rel=1e-5)
    by_hand = (math.log(30) + 4 * math.log(30 / 4) + 25 * math.log(30 / 25)) / 30
    assert float(entropy) == pytest.approx(by_hand, rel=1e-5)


def whole(hidden, weight, targets, temperature):
    """The same three from whole logits, by torch's own functions."""
    logits = hidden @ weight.T / temperature
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return -cross_entropy(logits, targets, reduction="none"), entropy, logits.argmax(-1) == targets


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 20), chunk_size=st.integers(1, 24), seed=st.integers(0, 999),
       temperature=st.sampled_from([1.0, 0.7]), with_entropy=st.booleans())
def test_chunks_give_the_values_and_gradients_of_the_whole(size, chunk_size, seed, temperature, with_entropy):
    results = []
    for is_chunked in (True, False):
        hidden, weight, targets = problem(size, seed)
        if is_chunked:
            logprobs, entropy, correct = token_logprobs(hidden, targets, lambda h, w=weight: h @ w.T,
                                                        temperature=temperature, chunk_size=chunk_size,
                                                        with_entropy=with_entropy)
            assert with_entropy or entropy is None
        else:
            logprobs, entropy, correct = whole(hidden, weight, targets, temperature)
        loss = -logprobs.mean() - (0.3 * entropy.sum() if with_entropy else 0)
        loss.backward()
        results.append((logprobs, entropy if with_entropy else logprobs, correct, hidden.grad, weight.grad))
    for chunked, expected in zip(*results, strict=True):
        torch.testing.assert_close(chunked, expected, rtol=1e-5, atol=1e-5)


def test_logits_are_never_larger_than_a_chunk_and_none_is_kept_for_the_backward_pass():
    hidden, weight, targets = problem(10)
    sizes, kept = [], []

    def head(rows):
        sizes.append(rows.shape[0])
        return rows @ weight.T

    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        logprobs, _, _ = token_logprobs(hidden, targets, head, chunk_size=4)
    assert sizes == [4, 4, 2]
    assert not any(shape[-1:] == (VOCABULARY,) for shape in kept)  # no row of logits outlives its chunk
    logprobs.sum().backward()
    assert sorted(sizes[3:]) == [2, 4, 4]  # computed again, chunk by chunk


@pytest.mark.parametrize("block", [11, 22, 33, 1 << 19])
def test_blocks_of_a_chunk_give_the_values_and_gradients_of_the_whole(block, monkeypatch):
    monkeypatch.setitem(likelihood._BLOCK_NUMBERS, "cpu", block)
    results = []
    for score in (partial(token_logprobs, with_entropy=True), None):
        hidden, weight, targets = problem(7)
        logprobs, entropy, correct = (score(hidden, targets, lambda h, w=weight: h @ w.T, 0.7) if score else
                                      whole(hidden, weight, targets, 0.7))
        (torch.arange(7) * logprobs + torch.arange(7).flip(0) * entropy).sum().backward()
        results.append((logprobs, entropy, correct, hidden.grad, weight.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_of_a_chunk_that_is_kept_only_its_logits_are_and_in_their_own_dtype():
    hidden, weight, targets = problem(6, dtype=torch.bfloat16)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        token_logprobs(hidden, targets, lambda h: h @ weight.T, with_entropy=True)
    assert [t.dtype for t in kept.values() if t.shape[-1:] == (VOCABULARY,) and len(t) == 6] == [torch.bfloat16]


def test_the_gradient_of_sixteen_bit_logits_is_that_of_fp32_rounded_once():
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    targets = torch.tensor([0, 3, 10, 2, 2])
    logprobs, _, _ = token_logprobs(logits, targets, lambda h: h)
    (logprobs * torch.arange(5)).sum().backward()
    exact = logits.detach().float().requires_grad_()
    (-cross_entropy(exact, targets, reduction="none") * torch.arange(5)).sum().backward()
    assert torch.equal(logits.grad, exact.grad.bfloat16())


def test_a_chunk_is_as_many_rows_as_128_mib_hold():
    assert chunk_rows(32_000, torch.bfloat16) == 2097 and chunk_rows(152_000, torch.float32) == 220
    assert chunk_rows(1 << 40, torch.float32) == 1


def test_without_gradients_nothing_is_computed_twice():
    hidden, weight, targets = problem(10)
    sizes = []
    with torch.no_grad():
        token_logprobs(hidden, targets, lambda h: sizes.append(len(h)) or h @ weight.T, chunk_size=4)
    assert sizes == [4, 4, 2]


def test_no_tokens_at_all_give_empty_vectors_and_zero_gradients():
    hidden, weight, targets = problem(0)
    logprobs, entropy, correct = token_logprobs(hidden, targets, lambda h: h @ weight.T, with_entropy=True)
    assert logprobs.shape == entropy.shape == correct.shape == (0,) and correct.dtype == torch.bool
    (-logprobs.sum() / 7).backward()
    assert weight.grad.abs().sum() == 0 and hidden.grad.shape == (0, HIDDEN)


def test_sixteen_bit_logits_are_normalised_in_fp32():
    hidden, weight, targets = problem(6, dtype=torch.bfloat16)
    logprobs, entropy, _ = token_logprobs(hidden, targets, lambda h: h @ weight.T, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = -cross_entropy((hidden @ weight.T).float(), targets, reduction="none")
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


def test_a_word_ruled_out_by_minus_infinity_leaves_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    logprobs, entropy, _ = token_logprobs(logits, torch.tensor([0]), lambda h: h, with_entropy=True)
    assert entropy.item() == pytest.approx(math.log(2)) and logprobs.item() == pytest.approx(-math.log(2))
    (logprobs + entropy).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_entropy_and_log_probabilities_never_come_from_padding():
    lengths, width = torch.tensor([3, 5]), 7
    generator = torch.Generator().manual_seed(1)
    states, ids = torch.randn(2, width, VOCABULARY, generator=generator), torch.randint(9, (2, width))
    mask = length_mask(lengths, width)
    results = []
    for fill in (0.0, math.nan):
        noisy, noisy_ids = states.masked_fill(~mask[:, :, None], fill), ids.masked_fill(~mask, int(fill == 0.0))
        batch = SequenceBatch(noisy_ids, mask, mask)
        results.append(token_logprobs(predicting(noisy, batch), predicted(batch), lambda h: h, with_entropy=True))
    assert results[0][0].shape == (2 + 4,)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[0][1] > 0).all()


def test_what_makes_no_sense_is_refused():
    hidden, weight, targets = problem(4)
    for options in ({"temperature": 0.0}, {"chunk_size": 0}):
        with pytest.raises(ValueError, match="positive"):
            token_logprobs(hidden, targets, lambda h: h @ weight.T, **options)
    with pytest.raises(ValueError, match="4 hidden states for 3 targets"):
        token_logprobs(hidden, targets[:3], lambda h: h @ weight.T)


def test_entropy_is_computed_where_it_is_asked_for_alone():
    hidden, weight, targets = problem(2)
    assert token_logprobs(hidden, targets, lambda h: h @ weight.T)[1] is None
    assert token_logprobs_and(None, (), hidden, targets, lambda h: h @ weight.T)[0][1] is None


def test_the_gradient_of_the_entropy_alone_by_hand():
    # p = 1/8, 2/8, 5/8; d entropy / d logit_j = -p_j (log p_j + entropy)
    p = torch.tensor([1 / 8, 2 / 8, 5 / 8])
    logits = p.log()[None].requires_grad_()
    _, entropy, _ = token_logprobs(logits, torch.tensor([0]), lambda h: h, with_entropy=True)
    entropy.sum().backward()
    by_hand = (math.log(8) + 2 * math.log(4) + 5 * math.log(8 / 5)) / 8
    torch.testing.assert_close(logits.grad[0], -p * (p.log() + by_hand))


def test_two_chunks_are_computed_twice_and_a_head_learns_from_states_that_do_not():
    hidden, weight, targets = problem(8)
    sizes = []
    logprobs, _, _ = token_logprobs(hidden.detach(), targets, lambda h: sizes.append(len(h)) or h @ weight.T,
                                    chunk_size=4)
    logprobs.sum().backward()
    assert sizes == [4, 4, 4, 4]
    expected = weight.detach().clone().requires_grad_()
    whole(hidden.detach(), expected, targets, 1.0)[0].sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-5, atol=1e-5)


def test_imitation_is_cross_entropy_as_a_share_of_all_tokens_with_its_accuracy():
    loss, observed = imitation_loss(torch.tensor([-1.0, -2.0]), torch.tensor([True, False]), denominator=6)
    assert float(loss) == 0.5
    assert {name: (float(mean), count) for name, (mean, count) in observed.items()} == {
        "loss": (1.5, 2), "mean_token_accuracy": (0.5, 2)}
    assert imitation_loss(torch.zeros(0), torch.zeros(0, dtype=torch.bool), denominator=6)[1] == {}


# --- Log-probabilities among kept words alone, against whole logits written out with torch's own functions

def truncated_problem(size, seed=0):
    """Hidden states, head, targets, and which words each target was drawn from: (size, V) bool, its own among them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(size, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (size,), generator=generator)
    allowed = torch.rand(size, VOCABULARY, generator=generator) < 0.4
    return hidden, weight, targets, allowed.scatter(1, targets[:, None], True)


def sets(allowed, rows=1):
    """The sets of `allowed`, as those of `rows` rows of tokens."""
    words = [row.nonzero()[:, 0].int() for row in allowed]
    cuts = [len(words) * i // rows for i in range(rows + 1)]
    return KeptSets.of_rows([words[a:b] for a, b in pairwise(cuts)])


def whole_among(hidden, weight, targets, allowed, temperature):
    logits = (hidden @ weight.T / temperature).masked_fill(~allowed, -1e9)
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("score_logits", [None, ops_for("cpu").token_scores], ids=["torch", "kernels"])
@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 20), chunk_size=st.integers(1, 24), rows=st.integers(1, 4), seed=st.integers(0, 999),
       temperature=st.sampled_from([1.0, 0.7]))
def test_values_and_gradients_are_those_of_whole_masked_logits(score_logits, size, chunk_size, rows, seed, temperature):
    results = []
    for is_chunked in (True, False):
        hidden, weight, targets, allowed = truncated_problem(size, seed)
        if is_chunked:
            logprobs, entropy, _ = token_logprobs(
                hidden, targets, lambda h, w=weight: h @ w.T, temperature, chunk_size, with_entropy=True,
                score_logits=score_logits, kept=sets(allowed, rows))
        else:
            logprobs, entropy = whole_among(hidden, weight, targets, allowed, temperature)
        (-logprobs.mean() - 0.3 * entropy.sum()).backward()
        results.append((logprobs, entropy, hidden.grad, weight.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_by_hand():
    # probabilities 1/8, 2/8, 5/8: among the first two 1/3 and 2/3; one word alone has 1, and teaches nothing
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log().repeat(2, 1).requires_grad_()
    kept = KeptSets([torch.tensor([0, 1, 2], dtype=torch.int32)], [torch.tensor([2, 1])])
    logprobs, entropy, correct = token_logprobs(logits, torch.tensor([1, 2]), lambda h: h, with_entropy=True, kept=kept)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([2 / 3, 1.0]))
    torch.testing.assert_close(entropy, torch.tensor([0.63651417, 0.0]))  # log 3 - 2/3 log 2
    assert correct.tolist() == [True, True]
    logprobs.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-1 / 3, 1 / 3, 0.0], [0.0, 0.0, 0.0]]))


def test_all_words_kept_change_no_bit():
    hidden, weight, targets, _ = truncated_problem(9)
    plain = token_logprobs(hidden, targets, lambda h: h @ weight.T, chunk_size=4, with_entropy=True)
    kept = sets(torch.ones(9, VOCABULARY, dtype=torch.bool), 3)
    among = token_logprobs(hidden, targets, lambda h: h @ weight.T, chunk_size=4, with_entropy=True, kept=kept)
    assert all(torch.equal(a, b) for a, b in zip(plain, among, strict=True))


def test_what_is_measured_beside_sees_all_words():
    hidden, weight, targets, allowed = truncated_problem(6)
    _, (lowest,) = token_logprobs_and(lambda logits: (logits.amin(-1),), (), hidden, targets, lambda h: h @ weight.T,
                                      chunk_size=4, kept=sets(allowed))
    torch.testing.assert_close(lowest, (hidden @ weight.T).amin(-1))


def test_no_tokens_and_calls_that_wait_for_others():
    hidden, weight, targets, allowed = truncated_problem(0)
    logprobs, entropy, _ = token_logprobs(hidden, targets, lambda h: h @ weight.T, with_entropy=True, num_chunks=3,
                                          kept=sets(allowed))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == (0,) and not weight.grad.any()


def test_as_many_sets_as_targets():
    hidden, weight, targets, allowed = truncated_problem(6)
    with pytest.raises(ValueError, match="6 hidden states for 6, 5 targets"):
        token_logprobs(hidden, targets, lambda h: h @ weight.T, kept=sets(allowed[:5]))


def test_a_word_without_logits_is_refused():
    hidden, weight, targets, allowed = truncated_problem(2)
    kept = sets(allowed) + KeptSets([], [])
    kept.ids[0][-1] = VOCABULARY
    with pytest.raises(ValueError, match="candidate token 11 is outside of 11 logits"):
        token_logprobs(hidden, targets, lambda h: h @ weight.T, kept=kept)


def test_rows_of_sets_are_chosen_and_joined_by_row():
    first, second, third = (torch.tensor(words, dtype=torch.int32) for words in ([1, 2], [3], [4, 5, 6]))
    kept = KeptSets.of_rows([[first, second], [], [third]])
    assert len(kept) == 3 and kept.num_bytes() == 6 * 4 + 3 * 8
    both = kept.rows(torch.tensor([2, 0])) + kept
    assert [ids.tolist() for ids in both.ids] == [[4, 5, 6], [1, 2, 3], [1, 2, 3], [], [4, 5, 6]]
    assert [sizes.tolist() for sizes in both.sizes] == [[3], [2, 1], [2, 1], [], [3]]
    assert [(ids.tolist(), sizes.tolist()) for ids, sizes in both.chunks(2)] == [
        ([4, 5, 6, 1, 2], [3, 2]), ([3, 1, 2], [1, 2]), ([3, 4, 5, 6], [1, 3])]


# --- The likeliest tokens beside a given one's log-probability: whole logits by hand, chunked or not

def likeliest(hidden, targets, head, num_top, chunk_size=1024):
    """Log-probabilities (N,) of the targets, the likeliest ids (N, k) and theirs (N, k)."""
    (logprobs, *_), (ids, top) = token_logprobs_and(lambda logits: top_k_logprobs(logits, num_top), (), hidden, targets,
                                                    head, chunk_size=chunk_size)
    return logprobs, ids, top


def test_the_numbers_are_those_of_a_softmax_by_hand():
    # e^0, e^ln2, e^ln5 of 8: probabilities 1/8, 2/8, 5/8
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]])
    logprobs, ids, top = likeliest(torch.zeros(1, 4), torch.tensor([1]), lambda _rows: logits, 2)
    assert logprobs.tolist() == pytest.approx([math.log(2 / 8)])
    assert ids.tolist() == [[2, 1]]
    assert top[0].tolist() == pytest.approx([math.log(5 / 8), math.log(2 / 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunks_are_the_whole(chunk_size, dtype):
    draws = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(11, 8, generator=draws), torch.randn(50, 8, generator=draws)
    logits = (hidden @ weight.T).to(dtype)
    targets = logits.float().argmax(-1)
    targets[::2] = 7
    sizes = []

    def head(rows):
        sizes.append(len(rows))
        return (rows @ weight.T).to(dtype)

    logprobs, ids, top = likeliest(hidden, targets, head, 5, chunk_size)
    want = torch.log_softmax(logits.double(), -1)
    assert max(sizes) <= chunk_size and sum(sizes) == 11
    assert torch.allclose(logprobs.double(), want.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(top.double(), want.sort(-1, descending=True).values[:, :5], atol=1e-5)
    assert torch.allclose(top.double(), want.gather(-1, ids), atol=1e-5)


def test_nothing_a_small_vocabulary_and_words_that_are_ruled_out():
    logprobs, ids, top = likeliest(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), lambda rows: rows, 3)
    assert (logprobs.shape, ids.shape, top.shape) == ((0,), (0, 3), (0, 3))
    _, ids, top = likeliest(torch.zeros(2, 4), torch.tensor([1, 1]), lambda rows: rows, 0)
    assert (ids.shape, top.shape) == ((2, 0), (2, 0))
    ruled_out = torch.tensor([[0.0, float("-inf")]])
    logprobs, ids, top = likeliest(torch.zeros(1, 1), torch.tensor([1]), lambda _rows: ruled_out, 20)
    assert logprobs.tolist() == [float("-inf")]
    assert ids.tolist() == [[0, 1]] and top.tolist() == [[0.0, float("-inf")]]
    for targets, chunk_size in ((torch.tensor([0]), 8), (torch.tensor([0, 0]), 0)):
        with pytest.raises(ValueError, match=r"must be|targets"):
            likeliest(torch.zeros(2, 4), targets, lambda rows: rows, 1, chunk_size)
