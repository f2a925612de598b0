"""Log-probabilities among kept words alone, against whole logits written out with torch's own functions."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rlhf.algorithms.likelihood import token_logprobs, token_logprobs_and
from hybrid_rlhf.core.tensors import KeptSets
from hybrid_rlhf.kernels import ops_for

HIDDEN, VOCABULARY = 5, 11


def problem(size, seed=0):
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


def whole(hidden, weight, targets, allowed, temperature):
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
        hidden, weight, targets, allowed = problem(size, seed)
        if is_chunked:
            logprobs, entropy, _ = token_logprobs(
                hidden, targets, lambda h, w=weight: h @ w.T, temperature, chunk_size, with_entropy=True,
                score_logits=score_logits, kept=sets(allowed, rows))
        else:
            logprobs, entropy = whole(hidden, weight, targets, allowed, temperature)
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
    hidden, weight, targets, _ = problem(9)
    plain = token_logprobs(hidden, targets, lambda h: h @ weight.T, chunk_size=4, with_entropy=True)
    kept = sets(torch.ones(9, VOCABULARY, dtype=torch.bool), 3)
    among = token_logprobs(hidden, targets, lambda h: h @ weight.T, chunk_size=4, with_entropy=True, kept=kept)
    assert all(torch.equal(a, b) for a, b in zip(plain, among, strict=True))


def test_what_is_measured_beside_sees_all_words():
    hidden, weight, targets, allowed = problem(6)
    _, (lowest,) = token_logprobs_and(lambda logits: (logits.amin(-1),), (), hidden, targets, lambda h: h @ weight.T,
                                      chunk_size=4, kept=sets(allowed))
    torch.testing.assert_close(lowest, (hidden @ weight.T).amin(-1))


def test_no_tokens_and_calls_that_wait_for_others():
    hidden, weight, targets, allowed = problem(0)
    logprobs, entropy, _ = token_logprobs(hidden, targets, lambda h: h @ weight.T, with_entropy=True, num_chunks=3,
                                          kept=sets(allowed))
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == (0,) and not weight.grad.any()


def test_as_many_sets_as_targets():
    hidden, weight, targets, allowed = problem(6)
    with pytest.raises(ValueError, match="6 hidden states for 6, 5 targets"):
        token_logprobs(hidden, targets, lambda h: h @ weight.T, kept=sets(allowed[:5]))


def test_a_word_without_logits_is_refused():
    hidden, weight, targets, allowed = problem(2)
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
