"""Scores of tokens by a kernel, against torch's own autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def assert_as_in_wide_numbers(kernel: Callable, logits: Tensor, targets: Tensor, temperature: float,
                              weights: tuple[float | None, float | None], bound: float) -> None:
    """Log-probabilities, entropies and gradients of their sums, weighted row by row; None: of one of them alone.

    bound: of the gradient, in the dtype of the logits.
    """
    by_logprobs, by_entropy = (None if w is None else w * torch.arange(1.0, len(logits) + 1, device=logits.device)
                               for w in weights)
    wide, own = logits.double().requires_grad_(), logits.detach().requires_grad_()
    want = -cross_entropy(wide / temperature, targets, reduction="none")
    want_entropy = torch.special.entr((wide / temperature).softmax(-1)).sum(-1)
    logprobs, entropy, correct = kernel(own, targets, temperature, by_entropy is not None)
    torch.testing.assert_close(logprobs.double(), want.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, wide.argmax(-1) == targets) and logprobs.dtype == torch.float32
    loss, found = logits.new_zeros((), dtype=torch.float64), logits.new_zeros((), dtype=torch.float32)
    if by_entropy is not None:
        torch.testing.assert_close(entropy.double(), want_entropy.detach(), rtol=1e-5, atol=1e-5)
        loss, found = loss + (want_entropy * by_entropy).sum(), found + (entropy * by_entropy).sum()
    else:
        assert entropy is None
    if by_logprobs is not None:
        loss, found = loss + (want * by_logprobs).sum(), found + (logprobs * by_logprobs).sum()
    gradient, = torch.autograd.grad(found, own)
    want_gradient, = torch.autograd.grad(loss, wide)
    assert gradient.dtype == logits.dtype and gradient.is_contiguous()
    # logits down to -90 have an fp32 rounding of 8e-6
    assert ((gradient.double() - want_gradient).abs() <= bound * want_gradient.abs() + 2e-5).all()
