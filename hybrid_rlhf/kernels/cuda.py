"""The Triton kernels of NVIDIA cards: the operations of kernels/reference.py, compiled by Triton on first use."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.kernels import launcher, reference
from hybrid_rlhf.kernels.fusions import are_close
from hybrid_rlhf.kernels.gradients import fused_by, token_scores_by
from hybrid_rlhf.kernels.ops import KernelsUnavailableError, Ops

_log = logging.getLogger(__name__)
_BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # of gradients; scores are in fp32


def load() -> Ops:
    """The operations in Triton. Raises KernelsUnavailableError where Triton is not installed, or cannot launch a kernel
    on this card.

    Tensors are fp32, bf16 or fp16 on one card; sums are in fp32. Nothing waits for the device, so all operations may be
    captured into a CUDA graph after one uncaptured run (which compiles). Token scores are computed by torch, with a
    warning, where ours differ from their definition on this card.
    """
    try:
        from hybrid_rlhf.kernels import (
            triton_attention,
            triton_fused,
            triton_layer,
            triton_sampling,
            triton_scores,
        )
    except ImportError as error:
        raise KernelsUnavailableError(f"Triton is not installed: {error}; pip install triton") from error
    name, scores = "cuda (Triton)", token_scores_by(triton_scores)
    if torch.cuda.is_available():
        if reason := launcher.why_no_launch():
            raise KernelsUnavailableError(f"Triton cannot launch kernels here: {reason}")
        if reason := why_not(scores):
            _log.warning("cuda kernels: log-probabilities are torch's (%s)", reason)
            name, scores = f"cuda (Triton; log-probabilities by torch: {reason})", None
    return Ops(name, triton_attention.decode_attention, triton_sampling.sample, fused=fused_by(triton_fused),
               linear_dtypes=frozenset([torch.bfloat16, torch.float16]), decode_layer=triton_layer.DecodeLayer,
               token_scores=scores)


def can_load() -> bool:
    """Whether `load` would find the operations, as far as can be known without doing so: True where there is no card,
    as a plan made here then runs elsewhere."""
    return not torch.cuda.is_available() or (importlib.util.find_spec("triton") is not None
                                             and not launcher.missing_tools())


def why_not(token_scores: Callable) -> str | None:
    """Why `token_scores` differ from the definition on the current card, in one line; None where they do not.

    Draws nothing from the card's generator. Out of memory is raised: it is not about the kernel.
    """
    wide = 4 * torch.randn(3, 5003, generator=torch.Generator().manual_seed(0))  # a block and a remainder
    wide[1, 7] = float("-inf")
    for dtype, bound in _BOUNDS.items():
        logits = wide.to("cuda", dtype)
        try:
            (want, want_gradient), (got, got_gradient) = (_with_gradient(function, logits) for function in
                                                          (reference.token_scores, token_scores))
        except Exception as error:  # Triton's compiler and the driver raise errors without a common class
            if is_out_of_memory(error):
                raise
            return next(iter(str(error).splitlines()), "") or type(error).__name__
        if not (are_close(want, got, _BOUNDS[torch.float32]) and are_close(want_gradient, got_gradient, bound)):
            return f"in {str(dtype).removeprefix('torch.')} ours differ from their definition"
    return None


@torch.enable_grad()
def _with_gradient(token_scores: Callable, logits: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Scores of three tokens, and the gradient of a weighted sum of them."""
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy, correct = token_scores(leaf, torch.tensor([0, 4990, 5002], device=leaf.device), 0.7, True)
    weights = torch.tensor([1.0, -2.0, 0.5], device=leaf.device)
    return (logprobs, entropy, correct), torch.autograd.grad((weights * (logprobs + 0.3 * entropy)).sum(), leaf)
