"""Attention over rows whose distinct tokens are packed into one row: it is spread out into the original rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.tensors import SequenceBatch
from hybrid_rlhf.models.transformers_compat import never_packed, sdpa_masks_replaced, sdpa_replaced


class NotShareableError(RuntimeError):
    """The attention of the model is not one that can share a prefix of rows."""


@dataclass
class Packing:
    """B rows of T tokens as N distinct tokens, and as S tokens in blocks of rows of similar length, for attention.

    index (B, T): which of the N each token is (padding: any); source (N,): a place of each in the flat (B * T);
    positions (N,). blocks: (rows, width) of each block; spread (S,): which of the N are in the blocks, row by row; home
    (N,): a place of each of the N in the S. groups: (first of the N, places (rows, length) in the S) of each prefix
    that several rows share.
    """

    index: Tensor
    source: Tensor
    positions: Tensor
    blocks: list[tuple[int, int]]
    spread: Tensor
    home: Tensor
    groups: list[tuple[int, Tensor]]

    def predicting(self, batch: SequenceBatch) -> Tensor:
        """(M,): which of the N predict the marked tokens of `batch`, as tensors.predicting orders them."""
        return self.index.flatten()[batch.places()]

    def counts(self, batch: SequenceBatch) -> Tensor:
        """(N,) fp32: how many tokens of `batch` each of the N is."""
        counts = torch.zeros(len(self.home), device=self.home.device)
        return counts.index_add_(0, self.index.flatten(), batch.attention_mask.flatten().float())


class _Spread(torch.autograd.Function):
    """(N, W) -> (S, W): every row in full. Gradients of a shared prefix are summed over its rows, in fp32."""

    @staticmethod
    def forward(ctx, tokens: Tensor, packed: Packing) -> Tensor:  # noqa: ANN001
        ctx.packed = packed
        return tokens.index_select(0, packed.spread)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001
        packed: Packing = ctx.packed
        out = gradient.index_select(0, packed.home)
        for start, places in packed.groups:
            rows = gradient.index_select(0, places.flatten()).view(*places.shape, -1)
            out[start : start + places.shape[1]] = rows.sum(0, dtype=torch.float32)
        return out, None


class _Gather(torch.autograd.Function):
    """(S, W) -> (N, W): each token from one of the rows that hold it."""

    @staticmethod
    def forward(ctx, rows: Tensor, home: Tensor) -> Tensor:  # noqa: ANN001
        ctx.home, ctx.size = home, len(rows)
        return rows.index_select(0, home)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001
        out = gradient.new_zeros(ctx.size, gradient.shape[1])
        return out.index_copy_(0, ctx.home, gradient.contiguous()), None


def _spread(x: Tensor, packed: Packing) -> list[Tensor]:
    """(1, H, N, D) -> (rows, H, width, D) for each block."""
    heads, dim = x.shape[1], x.shape[3]
    flat = _Spread.apply(x[0].transpose(0, 1).reshape(-1, heads * dim), packed)
    parts = flat.split([rows * width for rows, width in packed.blocks])
    return [part.view(*block, heads, dim).transpose(1, 2) for part, block in zip(parts, packed.blocks, strict=True)]


@dataclass
class RowAttention:
    """The attention of one forward over the distinct tokens of `packed`, and of a backward pass that recomputes its
    layers. num_calls: how often the model has called it."""

    packed: Packing
    num_calls: int = 0
    _bands: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block models use this attention; restarting positions do not count as packed rows."""
        with sdpa_replaced(self._attend), sdpa_masks_replaced(self._mask), never_packed():
            yield

    def _mask(self, original: Callable, *, config: object, device: torch.device, local_size: int | None = None,
              allow_is_causal_skip: bool = True, **named: object) -> Tensor | None:
        """transformers' mask interface. A sliding window's mask over all tokens, which would ignore rows, becomes an
        empty one whose shape (1, 1, 0, window) tells the layers the width of the window."""
        is_window = local_size is not None and local_size == getattr(config, "sliding_window", None)
        if is_window and allow_is_causal_skip and getattr(config, "attention_chunk_size", None) is None:
            return torch.empty(1, 1, 0, local_size, dtype=torch.bool, device=device)
        return original(config=config, device=device, local_size=local_size,
                        allow_is_causal_skip=allow_is_causal_skip, **named)

    def _attend(self, original: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
                attention_mask: Tensor | None, *options: object, **named: object) -> tuple[Tensor, None]:
        """transformers' attention interface, (1, H, N, D) -> (1, N, H, Dv), None. Each row attends by `original`."""
        self.num_calls += 1
        packed, window = self.packed, None if attention_mask is None else attention_mask.shape[-1]
        if attention_mask is not None and attention_mask.shape[:-1] != (1, 1, 0):
            raise NotShareableError(f"{type(module).__name__} attends by a mask")
        if not query.shape[2] == key.shape[2] == len(packed.home):
            raise NotShareableError(f"{type(module).__name__} attends to other tokens")
        masks = [self._band(width, window, query.device) for _, width in packed.blocks]
        blocks = zip(*(_spread(x, packed) for x in (query, key, value)), masks, strict=True)
        outputs = [original(module, *block, *options, **named)[0] for block in blocks]  # (rows, width, H, D)
        rows = [out.flatten(0, 1).flatten(1) for out in outputs]
        rows = rows[0] if len(rows) == 1 else torch.cat(rows)
        return _Gather.apply(rows, packed.home).view(1, -1, *outputs[0].shape[2:]), None

    def _band(self, width: int, window: int | None, device: torch.device) -> Tensor | None:
        """(width, width): the mask of a window shorter than the rows; None where causal attention is enough."""
        if window is None or width <= window:
            return None
        if (width, window) not in self._bands:
            places = torch.arange(width, device=device)
            distance = places[:, None] - places
            self._bands[width, window] = (distance >= 0) & (distance < window)
        return self._bands[width, window]
