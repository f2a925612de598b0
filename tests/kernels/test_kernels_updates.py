"""Scores of tokens and optimizer steps by a kernel, against torch's own autograd and optimizer in wide numbers."""

import shutil

import pytest
import torch

from hybrid_rlhf.kernels import cpu, reference
from hybrid_rlhf.kernels.ops import Updates
from tests.factories.token_scores import assert_as_in_wide_numbers

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


@pytest.fixture(scope="module", params=["reference", "cpu"])
def kernels(request):
    if request.param == "reference":
        return reference.token_scores, Updates(reference.adamw, reference.sum_of_squares)
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    ops = cpu.load()
    return ops.token_scores, ops.updates


def logits_of(size, words, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(size, words, generator=generator) - 60 * torch.rand(size, 1, generator=generator)
    return logits.to(dtype), torch.randint(words, (size,), generator=generator)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("words", [1, 5, 16, 50, 1003])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("weights", [(0.3, -0.2), (0.3, None), (None, -0.2)])
def test_scores_of_tokens_and_their_gradients_are_those_of_wide_logits(kernels, dtype, words, temperature, weights):
    logits, targets = logits_of(9, words, dtype)
    assert_as_in_wide_numbers(kernels[0], logits, targets, temperature, weights, DTYPES[dtype])


def test_words_ruled_out_ties_and_numbers_that_are_none(kernels):
    ruled_out = torch.tensor([[0.0, float("-inf"), 0.0, 0.0]], requires_grad=True)  # 1/3 each of three words
    logprobs, entropy, correct = kernels[0](ruled_out, torch.tensor([0]), 1.0, True)
    assert logprobs.item() == pytest.approx(-1.0986123) and entropy.item() == pytest.approx(1.0986123)
    assert correct.tolist() == [True]
    (logprobs.sum() + entropy.sum()).backward()
    assert ruled_out.grad[0].tolist() == pytest.approx([2 / 3, 0, -1 / 3, -1 / 3])
    tied = torch.tensor([[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]])
    assert kernels[0](tied, torch.tensor([1, 2]), 1.0, False)[2].tolist() == [True, False]
    broken = torch.full((1, 40), 0.0)
    broken[0, 33] = float("nan")
    assert kernels[0](broken, torch.tensor([1]), 1.0, False)[0].isnan().all()
    assert kernels[0](torch.empty(0, 7), torch.empty(0, dtype=torch.long), 1.0, True)[0].shape == (0,)
    turned = torch.randn(5, 3).T  # no row of it is dense
    expected = turned.log_softmax(-1)[:, 2]
    torch.testing.assert_close(kernels[0](turned, torch.tensor([2, 2, 2]), 1.0, False)[0], expected)


def test_a_target_that_is_no_word_is_an_error(kernels):
    for target in (-1, 4):
        with pytest.raises((IndexError, RuntimeError)):
            kernels[0](torch.zeros(1, 4), torch.tensor([target]), 1.0, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 15, 100, 40_000])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_a_step_is_torch_s_adamw_on_fp32_weights(kernels, dtype, count, factor):
    generator = torch.Generator().manual_seed(count)
    master = torch.randn(count, generator=generator)
    twin = torch.nn.Parameter(master.double())
    optimizer = torch.optim.AdamW([twin], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    weight, average, square = master.bfloat16(), torch.zeros(count), torch.zeros(count)
    for step in (1, 2, 3):
        gradient = torch.randn(count, generator=generator).to(dtype)
        twin.grad = gradient.double() * factor
        optimizer.step()
        kernels[1].adamw(weight, master, gradient, average, square, step=step, lr=1e-2, beta1=0.8, beta2=0.95, eps=1e-6,
                         weight_decay=0.1, factor=factor)
        assert kernels[1].sum_of_squares(gradient) == pytest.approx(gradient.double().square().sum().item(), rel=1e-6)
    state = optimizer.state[twin]
    torch.testing.assert_close(master.double(), twin.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(average.double(), state["exp_avg"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(square.double(), state["exp_avg_sq"], rtol=1e-5, atol=1e-9)
    assert torch.equal(weight, master.bfloat16())
    kernels[1].adamw(None, master, gradient, average, square, step=4, lr=0.0, beta1=0.8, beta2=0.95, eps=1e-6,
                     weight_decay=0.1)
    assert torch.equal(weight, master.bfloat16())  # rate 0: nothing has moved
