"""Tensor functions that every package shares: masked reductions, padding, and the one shift by one.

Layout used everywhere below the entry points: a sequence is prompt + response, right-padded to (B, T). A causal model's
real tokens never see right padding, so no architecture needs position ids or a padding mask to be exact on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor


@dataclass
class SequenceBatch:
    """Right-padded token sequences and the tokens that count.

    input_ids (B, T) long; attention_mask (B, T) bool, real tokens, made from lengths (never by comparing ids with the
    pad id: pad may equal eos); loss_mask (B, T) bool, the tokens to be predicted. position_ids (B, T) is set only for
    packed rows, where it restarts at 0 with every sample.
    """

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    position_ids: Tensor | None = None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device | str) -> SequenceBatch:
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v.to(device) for k, v in moved.items() if v is not None})

    def rows(self, index: Tensor) -> SequenceBatch:
        """The rows `index` (a long tensor), cut to their longest real length."""
        width = int(self.attention_mask[index].sum(1).max()) if len(index) else 0
        cut = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v[index, :width] for k, v in cut.items() if v is not None})


def pad_right(rows: Sequence[Sequence[float] | Tensor], value: float, dtype: torch.dtype = torch.long) -> Tensor:
    """Rows of unequal length as one (B, max length) tensor, filled up on the right with `value`."""
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
    return states[:, :-1][batch.loss_mask[:, 1:]]


def predicted(batch: SequenceBatch) -> Tensor:
    """The token ids (N,) that the rows of `predicting` predict, in the same order."""
    return batch.input_ids[:, 1:][batch.loss_mask[:, 1:]]


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
