"""The gradient of an input embedding as the rows that were looked up, never as a matrix of the vocabulary's size.

torch makes a dense matrix of mostly zeros and, where the output head is tied to the embedding, adds it to the head's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from hybrid_rlhf.kernels.fusions import forwards_by

AddRows = Callable[[nn.Parameter, Tensor, Tensor], None]


class _LookUp(torch.autograd.Function):
    """F.embedding whose backward pass gives the rows to `add_rows`. `anchor` requires a gradient, so that there is a
    backward pass; the weight comes in a tuple, so that autograd does not expect its gradient from here."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: Tensor, ids: Tensor, weights: tuple[nn.Parameter], padding_idx: int | None,
                add_rows: AddRows) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weights, ctx.padding_idx, ctx.add_rows = weights, padding_idx, add_rows
        return F.embedding(ids, weights[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[None, ...]:
        ids, = ctx.saved_tensors
        ids, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        is_real = None if ctx.padding_idx is None else ids != ctx.padding_idx
        if ids.device.type != "cpu":
            rows = rows if is_real is None else rows.masked_fill(~is_real[:, None], 0.0)
            ctx.add_rows(ctx.weights[0], *summed_in_place(ids, rows))
            return None, None, None, None, None
        if is_real is not None:
            ids, rows = ids[is_real], rows[is_real]
        ctx.add_rows(ctx.weights[0], *summed(ids, rows))
        return None, None, None, None, None


def summed_in_place(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """ids (N,), rows (N, H) -> the sorted ids (N,) and for each the sum of all its rows (N, H) in fp32. Repeated ids
    stay repeated: the host would have to wait to learn how many different ones there are."""
    ordered, order = ids.sort(stable=True)
    places = torch.nn.functional.pad((ordered[1:] != ordered[:-1]).cumsum(0), (1, 0))
    sums = rows.new_zeros(rows.shape, dtype=torch.float32).index_add_(0, places, rows[order].float())
    return ordered, sums[places]


def summed(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """ids (N,), rows (N, H) -> each id once (M,) and the sum of its rows (M, H) in fp32."""
    single, places = ids.unique(return_inverse=True)
    return single, rows.new_zeros(len(single), rows.shape[1], dtype=torch.float32).index_add_(0, places, rows.float())


def embeddings_by_rows(model: nn.Module, is_trained: Callable[[nn.Parameter], bool],
                       add_rows: AddRows) -> AbstractContextManager[int]:
    """Within the block plain input embeddings of `model` whose weight `is_trained` give their gradient to
    add_rows(weight, ids (M,), fp32 rows (M, H)) in the backward pass; yields how many do."""
    return forwards_by([
        (m, _forward(m, add_rows)) for m in model.modules() if type(m) is nn.Embedding and "forward" not in vars(m)
        and is_trained(m.weight) and m.max_norm is None and not m.scale_grad_by_freq and not m.sparse])


def _forward(module: nn.Embedding, add_rows: AddRows) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:  # noqa: A002 - nn.Embedding's own name for it
        if not torch.is_grad_enabled() or not module.weight.requires_grad:
            return F.embedding(input, module.weight, module.padding_idx)
        anchor = torch.zeros((), requires_grad=True)
        return _LookUp.apply(anchor, input, (module.weight,), module.padding_idx, add_rows)

    return forward
