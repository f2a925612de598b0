"""The likeliest tokens: whole logits by hand, chunked or not."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid_rlhf.algorithms.top_tokens import top_tokens


def test_the_numbers_are_those_of_a_softmax_by_hand():
    # e^0, e^ln2, e^ln5 of 8: probabilities 1/8, 2/8, 5/8
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]])
    found = top_tokens(torch.zeros(1, 4), torch.tensor([1]), lambda _rows: logits, 2)
    assert found.logprobs.tolist() == pytest.approx([math.log(2 / 8)])
    assert found.ids.tolist() == [[2, 1]]
    assert found.top_logprobs[0].tolist() == pytest.approx([math.log(5 / 8), math.log(2 / 8)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_chunks_are_the_whole_and_a_given_token_at_the_top_has_one_number(chunk_size, dtype):
    draws = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(11, 8, generator=draws), torch.randn(50, 8, generator=draws)
    logits = (hidden @ weight.T).to(dtype)
    targets = logits.float().argmax(-1)
    targets[::2] = 7
    sizes = []

    def head(rows):
        sizes.append(len(rows))
        return (rows @ weight.T).to(dtype)

    found = top_tokens(hidden, targets, head, 5, chunk_size)
    want = torch.log_softmax(logits.double(), -1)
    assert max(sizes) <= chunk_size and sum(sizes) == 11
    assert torch.allclose(found.logprobs.double(), want.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(found.top_logprobs.double(), want.sort(-1, descending=True).values[:, :5], atol=1e-5)
    assert torch.equal(found.top_logprobs[1::2, 0], found.logprobs[1::2])  # not only nearly


def test_nothing_a_small_vocabulary_and_words_that_are_ruled_out():
    empty = top_tokens(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), lambda rows: rows, 3)
    assert (empty.logprobs.shape, empty.ids.shape) == ((0,), (0, 3))
    ruled_out = torch.tensor([[0.0, float("-inf")]])
    found = top_tokens(torch.zeros(1, 1), torch.tensor([1]), lambda _rows: ruled_out, 20)
    assert found.logprobs.tolist() == [float("-inf")] and found.ids.tolist() == [[0, 1]]
    for wrong in ((torch.zeros(1, 4), 1, 8), (torch.zeros(2, 4), -1, 8), (torch.zeros(2, 4), 1, 0)):
        with pytest.raises(ValueError, match=r"must be|targets"):
            top_tokens(wrong[0], torch.tensor([0, 0]), lambda rows: rows, *wrong[1:])
