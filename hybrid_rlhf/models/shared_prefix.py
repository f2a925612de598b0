"""Shared prefixes: rows with a common prefix, such as the responses to one prompt, compute that prefix once.

The states of a token depend on the token and those before it. So all rows become one row of distinct tokens, each
group's prefix once and without padding; only for attention it is spread out into the original rows (2506.05433 has the
idea in another form). Exact, up to the rounding of sums; whether a model allows it is tried on the model itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybrid_rlhf.core.errors import present
from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.tensors import SequenceBatch, length_mask, to_device, token_budget_groups
from hybrid_rlhf.models import images
from hybrid_rlhf.models.backbone import joining, text_backbone
from hybrid_rlhf.models.hf_attention import forward_parameters
from hybrid_rlhf.models.transformers_compat import (
    attention_name,
    can_recompute_within,
    never_packed,
    recomputed_within,
    sdpa_masks_replaced,
    sdpa_replaced,
)

_BLOCK_TOKENS = 32  # cost of another block in attention, in padding tokens
# On a card each block is a dozen launches a layer, worth up to 4096 tokens; but an eighth of all at most, as the
# backward pass keeps them. Widths are multiples of 64, for fewer shapes.
_CARD_BLOCK_TOKENS, _CARD_SHARE, _CARD_WIDTHS = 4096, 1 / 8, 64
LEAST_SAVED = 0.1  # share of the batch's tokens with padding: below it, spreading out costs as much as it saves

_log = logging.getLogger(__name__)
_warned_packed: WeakSet[nn.Module] = WeakSet()
_warned_shared: WeakSet[nn.Module] = WeakSet()


def beginnings(batch: SequenceBatch) -> list[tuple[int, bytes]]:
    """(length, bytes) of the prefix of each row: the tokens before its first marked one."""
    lengths = batch.loss_mask.int().argmax(1).tolist()
    ids = batch.input_ids.cpu().numpy()
    return [(n, row[:n].tobytes()) for n, row in zip(lengths, ids, strict=True)]


def _common(batch: SequenceBatch, keys: Sequence[tuple[int, bytes]]) -> tuple[int, list[int]]:
    """How many tokens the different beginnings of rows have in common, such as a system prompt, and these rows: all
    that have a beginning; 0 where sharing them saves too little."""
    opened = [i for i, (n, _) in enumerate(keys) if n]
    ids, num_kinds = batch.on_host().input_ids[opened], len({keys[i] for i in opened})
    if num_kinds < 2:
        return 0, []
    same = (ids == ids[0]).all(0)[: min(keys[i][0] for i in opened)]
    length = int(same.long().cumprod(0).sum())
    is_worth = length * (num_kinds - 1) >= LEAST_SAVED * int(batch.attention_mask.sum())
    return (length, opened) if is_worth else (0, [])


def prefix_groups(batch: SequenceBatch) -> Tensor | None:
    """(B,) long: each row's group, the rows with its prefix, as the index of its first row; None where sharing saves
    too little, and for rows with images, whose prefix is more than its tokens."""
    if batch.images is not None:
        return None
    first: dict[tuple[int, bytes], int] = {}
    keys = beginnings(batch)
    groups = torch.tensor([first.setdefault(key, i) for i, key in enumerate(keys)])
    common, _ = _common(batch, keys)
    saved = sum(n for n, _ in keys) - sum(n for n, _ in first) + common * (sum(n > 0 for n, _ in first) - 1)
    return groups if saved >= LEAST_SAVED * int(batch.attention_mask.sum()) else None


def packing(batch: SequenceBatch) -> Packing | None:
    """How the rows of `batch` share their prefixes; None where that saves too little, or there are images."""
    if batch.images is not None:
        return None
    device, batch = batch.input_ids.device, batch.on_host()
    lengths, width = batch.attention_mask.sum(1).tolist(), batch.input_ids.shape[1]
    groups: dict[tuple[int, bytes], list[int]] = {}
    keys = beginnings(batch)
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    common, opened = _common(batch, keys)
    size = (sum(lengths) - sum(n * (len(rows) - 1) for (n, _), rows in groups.items())
            - common * (sum(n > 0 for n, _ in groups) - 1))
    if size > (1 - LEAST_SAVED) * len(batch) * width or (not common and all(len(r) == 1 for r in groups.values())):
        return None
    index = torch.zeros(len(batch), width, dtype=torch.long)
    index[opened, :common] = torch.arange(common)
    source, positions = [opened[0] * width + t for t in range(common)], list(range(common))
    shared = [(0, 0, common, opened)] * (common > 0)
    for (n, _), rows in groups.items():
        start, first = len(source), common if n else 0
        source += range(rows[0] * width + first, rows[0] * width + n)
        positions += range(first, n)
        shared += [(start, first, n - first, rows)] * (len(rows) > 1 and n > first)
        for i in rows:
            index[i, first:n] = torch.arange(start, start + n - first)
            index[i, n : lengths[i]] = torch.arange(len(source), len(source) + lengths[i] - n)
            source += range(i * width + n, i * width + lengths[i])
            positions += range(n, lengths[i])
    return _in_blocks(index, torch.tensor(source), torch.tensor(positions), torch.tensor(lengths), shared, device)


def documents(batch: SequenceBatch) -> Packing:
    """The documents of packed rows (position_ids restart at 0 with each) as separate rows in attention: nothing is
    shared, no document attends to another, and no (T, T) mask is made."""
    host, device = batch.on_host(), batch.input_ids.device
    source = host.attention_mask.flatten().nonzero()[:, 0]
    positions = present(host.position_ids, "position_ids").flatten()[source]
    starts = (positions == 0).nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([len(source)]))
    width = int(lengths.max())
    rows = (starts[:, None] + torch.arange(width)).clamp(max=len(source) - 1)
    owners = torch.arange(len(starts)).repeat_interleave(lengths)
    packed = _in_blocks(rows, owners * width + positions, positions, lengths, [], device)
    index = torch.zeros(batch.input_ids.numel(), dtype=torch.long).index_copy_(0, source, torch.arange(len(source)))
    return replace(packed, index=to_device(index.view(batch.input_ids.shape), device), source=to_device(source, device))


def _in_blocks(index: Tensor, source: Tensor, positions: Tensor, lengths: Tensor,
               shared: list[tuple[int, int, int, list[int]]], device: torch.device) -> Packing:
    """shared: (first of the N, first column, length, rows) of each run of tokens that several rows have there."""
    unit, cost, width = 1, _BLOCK_TOKENS, index.shape[1]
    if device.type == "cuda":
        unit, cost = _CARD_WIDTHS, min(_CARD_BLOCK_TOKENS, _CARD_SHARE * int(lengths.sum()))
    members = token_budget_groups(lengths, index.numel(), cost)
    blocks = [(len(rows), -(int(lengths[rows].max()) // -unit) * unit) for rows in members]
    wide = functional.pad(index, (0, -width % unit))  # causal attention does not see what follows a row
    spread = torch.cat([wide[rows, :size].flatten() for rows, (_, size) in zip(members, blocks, strict=True)])
    first, places = 0, torch.zeros_like(index)  # of each token of the batch, in the blocks
    for rows, (count, size) in zip(members, blocks, strict=True):
        places[rows, :size] = first + torch.arange(count * size).view(count, size)[:, :width]
        first += count * size
    groups = [(start, to_device(places[rows, column : column + n], device)) for start, column, n, rows in shared]
    home = places.flatten()[source]
    index, source, positions, spread, home = (to_device(x, device) for x in (index, source, positions, spread, home))
    return Packing(index, source, positions, blocks, spread, home, groups)


def distinct_states(model: nn.Module, batch: SequenceBatch, packed: Packing) -> Tensor:
    """(N, H): the last hidden states of the distinct tokens of `batch`, which packed.index spreads out into rows.

    Raises NotShareableError for a model whose attention is not plain causal attention by transformers' registry.
    """
    return _distinct(model, batch, packed).last_hidden_state[0]


def distinct_states_and_router_logits(model: nn.Module, batch: SequenceBatch,
                                      packed: Packing) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`distinct_states`, and the router logits of each layer with experts for these tokens, (N, experts)."""
    out = _distinct(model, batch, packed, output_router_logits=True)
    return out.last_hidden_state[0], out.router_logits


def _distinct(model: nn.Module, batch: SequenceBatch, packed: Packing, **options: bool) -> Any:  # of transformers
    ids, attention = batch.input_ids.flatten()[packed.source][None], RowAttention(packed)
    backbone = text_backbone(model)
    joint = joining(model)
    zero = images.blank_features(joint, images.num_blank(joint, {}))
    with attention.installed(), recomputed_within(model, attention.installed):
        out = backbone(input_ids=ids, use_cache=False, position_ids=packed.positions[None], **options)
    num_layers = backbone.config.get_text_config().num_hidden_layers
    if attention.num_calls != num_layers:  # the other layers mix tokens in another way
        raise NotShareableError(f"{type(model).__name__}: {attention.num_calls} of {num_layers} layers attend where "
                                "we look")
    return out if zero is None else images.plus(out, zero)


def say_whole(model: nn.Module, reason: str, *, is_packed: bool) -> None:
    """Warn once per model why some rows are computed in full. is_packed: they are packed rows."""
    warned = _warned_packed if is_packed else _warned_shared
    if model not in warned and is_packed:
        _log.warning("data.packing: documents are kept apart by masks whose memory grows with the square of "
                     "data.max_length (%s)", reason)
    elif model not in warned:
        _log.warning("rows that begin alike are computed one by one where that cannot be shared (%s)", reason)
    warned.add(model)


@torch.no_grad()
def sharing_is_exact(model: nn.Module, tolerance: float = 1e-3) -> bool | None:
    """Whether rows that share their prefix give the states that they have alone, tried on this model.

    False, without a trial, where checkpointing is not by torch's function, and for models whose attention is not
    transformers' "sdpa". None where memory ran out, which leaves it open.
    """
    backbone = text_backbone(model)
    names = forward_parameters(backbone)
    if (not {"position_ids", "attention_mask"} <= names or attention_name(backbone.config) != "sdpa"
            or not can_recompute_within(model)):
        return False
    weight = next(model.parameters())
    lengths = torch.tensor([14, 9, 8, 12])
    ids = torch.arange(3, 59, device=weight.device).view(4, 14) % backbone.config.get_text_config().vocab_size
    ids[1, :6], ids[3, :5] = ids[0, :6], ids[2, :5]
    real = length_mask(lengths).to(weight.device)
    begun = length_mask(torch.tensor([6, 6, 5, 5]), 14).to(weight.device)
    batch = SequenceBatch(ids * real, real, real & ~begun)
    training = model.training
    model.eval()
    try:
        packed = present(packing(batch), "packing")
        shared = distinct_states(model, batch, packed).index_select(0, packed.predicting(batch)).float()
        rows = [backbone(input_ids=ids[i : i + 1, :n], use_cache=False).last_hidden_state[0]
                for i, n in enumerate(lengths.tolist())]
    except (NotShareableError, TypeError, ValueError, RuntimeError, IndexError) as error:
        return None if is_out_of_memory(error) else False
    finally:
        model.train(training)
    alone = torch.cat([r[p - 1 : -1] for r, p in zip(rows, (6, 6, 5, 5), strict=True)]).float()
    bound = tolerance if weight.dtype == torch.float32 else 0.05
    return bool((shared - alone).abs().max() <= bound * alone.abs().max().clamp(min=1e-6))


# -- Attention over rows whose distinct tokens are packed into one row: it is spread out into the original rows --------


class NotShareableError(RuntimeError):
    """The attention of the model is not one that can share a prefix of rows."""


@dataclass
class Packing:
    """B rows of T tokens as N distinct tokens, and as S tokens in blocks of rows of similar length, for attention.

    index (B, T): which of the N each token is (padding: any); source (N,): a place of each in the flat (B * T);
    positions (N,). blocks: (rows, width) of each block; spread (S,): which of the N are in the blocks, row by row; home
    (N,): a place of each of the N in the S. groups: (first of the N, places (rows, length) in the S) of each run of
    tokens that several rows share.
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
