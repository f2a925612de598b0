"""The likeliest tokens beside a given one's log-probability: whole logits by hand, chunked or not."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rlhf.algorithms.divergence import top_k_logprobs
from hybrid_rlhf.algorithms.likelihood import token_logprobs_and


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
