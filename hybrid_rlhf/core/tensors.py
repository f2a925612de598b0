"""Tensor functions that every package shares: masked reductions, padding, and the one shift by one.

Layout used everywhere below the entry points: a sequence is prompt + response, right-padded to (B, T). A causal model's
real tokens never see right padding, so no architecture needs position ids or a padding mask to be exact on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybrid_rlhf.core.image_files import ImageRef


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`. The copy from the host to an accelerator is asynchronous: a plain one would wait for it,
    and for all that was launched before."""
    device = torch.device(device)
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    with suppress(RuntimeError):  # where the system grants no pinned memory the copy is as slow as it was
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class PackedMatrix(NamedTuple):
    """A frozen weight (out, in) in 4 or 8 bits. Those that a kernel reads together have one table.

    In 4 bits values (out * in / 2,) uint8 are two places in `table` (16,) fp32 each, the first in the high half, and
    scales (out * in / 64,) fp32 are factors of 64 numbers of a row each (QLoRA, 2305.14314). In 8 bits, table None,
    values (out, in) int8 have a factor a row, scales (out,) fp32.
    """

    values: Tensor
    scales: Tensor
    table: Tensor | None
    shape: torch.Size


@dataclass
class KeptSets:
    """The candidate tokens from which truncated sampling (top-k, top-p, min-p) drew the marked tokens of B rows: the
    softmax is taken over them, in place of the vocabulary. On the host.

    ids: of each row (M_i,) int32, the candidates of its marked tokens one after the other; sizes: of each row (n_i,)
    long, how many candidates each of them has.
    """

    ids: list[Tensor]
    sizes: list[Tensor]

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Tensor]]) -> KeptSets:
        """rows: of each row the candidates (int32) of every marked token."""
        return cls([torch.cat([torch.zeros(0, dtype=torch.int32), *row]) for row in rows],
                   [torch.tensor([len(kept) for kept in row], dtype=torch.long) for row in rows])

    def __len__(self) -> int:
        return len(self.ids)

    def __add__(self, other: KeptSets) -> KeptSets:
        return KeptSets(self.ids + other.ids, self.sizes + other.sizes)

    def rows(self, index: Tensor) -> KeptSets:
        """The rows `index` (a long tensor), in that order."""
        chosen = index.tolist()
        return KeptSets([self.ids[i] for i in chosen], [self.sizes[i] for i in chosen])

    def below(self, size: int) -> KeptSets:
        """The candidates below `size`, for a model with a smaller vocabulary."""
        ids, sizes = [], []
        for candidates, counts in zip(self.ids, self.sizes, strict=True):
            tokens = torch.arange(len(counts)).repeat_interleave(counts)[candidates < size]
            ids.append(candidates[candidates < size])
            sizes.append(torch.bincount(tokens, minlength=len(counts)))
        return KeptSets(ids, sizes)

    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.ids, *self.sizes))

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, sizes) of every `size` marked tokens, row by row."""
        sizes = torch.cat([torch.zeros(0, dtype=torch.long), *self.sizes]).split(size)
        ids = torch.cat([torch.zeros(0, dtype=torch.int32), *self.ids])
        return zip(ids.split([int(part.sum()) for part in sizes]), sizes, strict=True)


@dataclass
class SequenceBatch:
    """Right-padded token sequences and the tokens that count.

    input_ids (B, T) long; attention_mask (B, T) bool, real tokens, made from lengths (never by comparing ids with the
    pad id: pad may equal eos); loss_mask (B, T) bool, the tokens to be predicted. position_ids (B, T) is set only for
    packed rows, where it restarts at 0 with every sample. kept: where the marked tokens were drawn by truncated
    sampling, their candidates: the distribution is then normalised over these alone. images: of each row, in the order
    of their tokens; None where no row has one. Decisions about sizes (which tokens are marked, which rows share a
    prefix) use `on_host()`: reading an accelerator's tensors would wait for it.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None
    kept: KeptSets | None = None
    images: list[tuple[ImageRef, ...]] | None = None
    _origin: SequenceBatch | None = field(default=None, init=False, repr=False, compare=False)
    _places: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str) -> SequenceBatch:
        tensors: dict[str, Any] = {k: to_device(v, device) for k, v in self._tensors().items()}
        moved = replace(self, **tensors)
        moved._origin = self.on_host() if self._origin or not self._is_on_device() else None
        return moved

    def on_host(self) -> SequenceBatch:
        """The batch on the CPU: the original, or a copy."""
        return self._origin or (self.to("cpu") if self._is_on_device() else self)

    def places(self) -> Tensor:
        """(N,) long: where in the flat (B * T) the predecessors of the marked tokens stand, row by row."""
        if self._places is None:
            host = self.on_host()
            marked = torch.nn.functional.pad(host.loss_mask[:, 1:], (0, 1))  # no token 0: it has no predecessor
            self._places = to_device(marked.flatten().nonzero()[:, 0], self.input_ids.device)
        return self._places

    def _is_on_device(self) -> bool:
        return self.input_ids.device.type != "cpu"

    def _tensors(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return {name: tensor for name, tensor in values.items() if isinstance(tensor, Tensor)}

    def rows(self, index: Tensor) -> SequenceBatch:
        """The rows `index` (a long tensor), cut to their longest real length."""
        width = int(self.attention_mask[index].sum(1).max()) if len(index) else 0
        images = None if self.images is None else [self.images[i] for i in index.tolist()]
        return replace(self, **{k: v[index, :width] for k, v in self._tensors().items()},
                       kept=None if self.kept is None else self.kept.rows(index),
                       images=images if images and any(images) else None)


def pad_right(rows: Sequence[Sequence[float] | Tensor], value: float, dtype: torch.dtype = torch.long) -> Tensor:
    """Rows of unequal length as one (B, max length) tensor, padded on the right with `value`."""
    out = torch.full((len(rows), max((len(r) for r in rows), default=0)), value, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out


def length_mask(lengths: Tensor | Sequence[int], width: int | None = None) -> Tensor:
    """(B,) lengths -> (B, width) bool, true on the first `length` columns of each row."""
    lengths = torch.as_tensor(lengths)
    width = int(lengths.max()) if width is None and len(lengths) else (width or 0)
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def predicting(states: Tensor, batch: SequenceBatch) -> Tensor:
    """Rows of `states` (B, T, ...) that predict the tokens marked by batch.loss_mask, flat (N, ...), in row order.

    Token t is predicted by the state at t - 1: this function is the only place that knows. Token 0 has no
    predecessor and is never predicted, whatever the mask says.
    """
    return states.flatten(0, 1).index_select(0, batch.places())


def predicted(batch: SequenceBatch) -> Tensor:
    """The token ids (N,) that the rows of `predicting` predict, in the same order."""
    return batch.input_ids.flatten().index_select(0, batch.places() + 1)


def summed_by_row(flat: Tensor, batch: SequenceBatch) -> Tensor:
    """(B,): the sum of each row's values; flat (N,) as `predicting` orders them."""
    rows, width = batch.input_ids.shape[0], batch.input_ids.shape[1] - 1
    places = batch.places()
    places = places - places.div(width + 1, rounding_mode="floor")  # in the flat (B * (T - 1))
    return flat.new_zeros(rows * width).index_copy(0, places, flat).view(rows, width).sum(1)


def scatter(flat: Tensor, mask: Tensor) -> Tensor:
    """Flat values (N,) back to the true positions of `mask` (B, R), zero elsewhere; differentiable."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over the true positions of `mask`; values elsewhere, NaN included, do not matter."""
    return values.masked_fill(~mask, 0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the true positions of `mask` (0 where there is none)."""
    return masked_sum(values, mask) / mask.sum().clamp(min=1)


def last_true(mask: Tensor) -> Tensor:
    """(B, T) bool -> (B,) index of the last true column of each row; -1 for a row without one."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, columns, -1).amax(1)


def token_budget_groups(lengths: Tensor, max_tokens: int, group_tokens: float = 1 << 30) -> list[Tensor]:
    """Row indices in groups whose padded size (rows x longest row) stays within max_tokens; at least one row each.

    Of all ways to cut the rows, longest first, the one with the least padded tokens plus group_tokens for every group:
    what a group costs however small it is, in tokens that could be computed meanwhile. The default asks for as few
    groups as possible. The same lengths give the same groups.
    """
    order = torch.argsort(lengths, descending=True, stable=True)
    sizes = lengths[order].cpu().numpy()
    least = np.zeros(len(sizes) + 1)  # of the first n rows
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)  # of the last group of the first n rows
    for end in range(1, len(sizes) + 1):
        first = np.arange(end)
        padded = (end - first) * sizes[:end]
        cost = np.where((padded <= max_tokens) | (first == end - 1), least[:end] + padded, np.inf)
        starts[end] = cost.argmin()
        least[end] = cost.min() + group_tokens
    groups: list[Tensor] = []
    end = len(sizes)
    while end:
        groups.append(order[starts[end] : end].cpu())
        end = int(starts[end])
    return groups[::-1]


def prefix_groups_within(prefix_groups: Tensor, lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Row indices in groups whose padded size stays within max_tokens (one row at least), rows of one group of
    prefix_groups (B,) next to each other, since they share tokens."""
    groups: list[list[int]] = [[]]
    longest = 0
    for i in torch.argsort(prefix_groups, stable=True).tolist():
        longest = max(longest, int(lengths[i]))
        if groups[-1] and (len(groups[-1]) + 1) * longest > max_tokens:
            groups.append([])
            longest = int(lengths[i])
        groups[-1].append(i)
    return [torch.tensor(group) for group in groups if group]
