"""The KV cache of the decode engine: slots of one sequence each, column = position, no left padding.

A slot's columns lie side by side, or in pages (pages.py) where `num_pages` is given: each layer then stores pages of
some columns, and a slot with all columns is one page for those who read it.
A layer allocates itself from the first keys it stores, so that grouped heads, latent attention and per-layer sizes need
no table. Sliding-window layers are stored at full length; the mask applies the window. Convolution and recurrent states
are one row per slot.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.memory import free_host_bytes
from hybrid_rlhf.engine.decode.pages import Pages, lazy_zeros, page_size
from hybrid_rlhf.kernels.reference import columns_of, places_of
from hybrid_rlhf.models.hf_attention import LayerKind, cache_class, derived, layer_kinds


@dataclass
class Step:
    """The current forward. slots (B,) int64: the slot of each row; None: row b is slot b.

    positions (B, Q) int64, the columns of the tokens (-1: an idle row, if has_idle); width: columns that attention may
    attend to. In a prefill of N prompts row source[i] is stored in slot targets[i], after its first `offset` columns.
    ragged: where rows continue from different numbers of columns, (row, index in it, slot, column), (N,) int64 each, of
    all real tokens; the padding behind them is not stored. Over pages the cache sets these to page and column there;
    and `grid`, of a prefill that is not ragged: the page (N, Q) and column there (Q,) of each token.
    shift (B, 1): what positions are more than columns, behind images of fewer positions than tokens. sees_ahead: the
    tokens of an image may attend to its later ones, if the model's mask says so.
    `fresh` holds weak references to the keys that a layer handed out: strong ones would hold a second cache.
    """

    positions: Tensor
    width: int
    slots: Tensor | None = None
    is_prefill: bool = False
    source: Tensor | None = None
    targets: Tensor | None = None
    offset: int = 0
    ragged: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    has_idle: bool = False
    shift: Tensor | None = None
    sees_ahead: bool = False
    grid: tuple[Tensor, Tensor] | None = None
    pages: Tensor | None = None  # of each row of a decode step (B, N), and where its token lies, once asked for
    place: tuple[Tensor, Tensor] | None = None
    fresh: dict[int, tuple[KeyValueRows, weakref.ref, weakref.ref]] = field(default_factory=dict)

    def hand_out(self, layer: KeyValueRows, key: Tensor, value: Tensor) -> None:
        self.fresh[id(key)] = (layer, weakref.ref(key), weakref.ref(value))

    def owner_of(self, key: Tensor, value: Tensor) -> KeyValueRows | None:
        """The layer that handed out exactly these tensors in this forward, or None."""
        layer, *refs = self.fresh.get(id(key), (None,))
        return layer if layer and refs[0]() is key and refs[1]() is value else None

    @property
    def goes_on(self) -> bool:
        """Whether a prefill's tokens attend to columns stored before."""
        return bool(self.offset) or self.ragged is not None

    def store(self, rows: Tensor, new: Tensor) -> None:
        """Put the columns of a prefill (B, heads, Q, dim) into a layer's slots or pages (S, heads, C, dim)."""
        if self.ragged is not None:
            row, place, slot, column = self.ragged
            rows[slot, :, column] = new[row, :, place]
            return
        new = new if self.source is None else new[self.source]
        if self.grid is not None:
            page, column = self.grid
            rows[page, :, column] = new.transpose(1, 2)
            return
        rows.narrow(2, self.offset, new.shape[2]).index_copy_(0, self.targets, new)

    @property
    def places(self) -> Tensor:
        """The positions as the model sees them: an idle row's -1 becomes 0."""
        return self.positions.clamp(min=0) if self.has_idle else self.positions


class KeyValueRows:
    """Keys and values of one layer, (S, heads, C, dim): of S slots of all columns, or S pages of some."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: SlotCache, index: int, kind: LayerKind) -> None:
        self.owner, self.index, self.is_sliding = owner, index, kind.is_sliding
        self.is_initialized = True
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.indexer_keys: Tensor | None = None

    def allocate(self, key: Tensor, value: Tensor) -> None:
        """Zeros, not uninitialised: attention multiplies masked columns by weights of zero, and zero times NaN is
        NaN."""
        size = (self.owner.num_stored, key.shape[1], self.owner.page_columns)
        self.keys = lazy_zeros((*size, key.shape[-1]), key)
        self.values = lazy_zeros((*size, value.shape[-1]), value)

    def update(self, key: Tensor, value: Tensor, *_args: object, **_kwargs: object) -> tuple[Tensor, Tensor]:
        """Store the new columns and return those to attend to; or leave the writing to the attention function."""
        if self.keys is None:
            self.allocate(key, value)
        step = self.owner.step
        if step.is_prefill:
            step.store(self.keys, key)
            step.store(self.values, value)
            if step.goes_on:
                pages = self.owner.pages_of(step.targets)
                return columns_of(self.keys, pages, step.width), columns_of(self.values, pages, step.width)
        if step.is_prefill or self.index in self.owner.fused_cache_write:
            step.hand_out(self, key, value)
            return key, value
        self.write(key, value)
        return self.columns()

    def write(self, key: Tensor, value: Tensor) -> None:
        """Store one new token per row; an idle row's position -1 is the last column, that of a token that no step
        reads."""
        page, column = self.owner.row_place()
        self.keys[page, :, column] = key[:, :, 0]
        self.values[page, :, column] = value[:, :, 0]

    def columns(self) -> tuple[Tensor, Tensor]:
        """The first `width` columns of the step's rows: views where rows and slots agree."""
        step = self.owner.step
        if step.slots is None and self.owner.pages is None:
            return tuple(t[: len(step.positions), :, : step.width] for t in (self.keys, self.values))
        pages = self.owner.row_pages()
        return columns_of(self.keys, pages, step.width), columns_of(self.values, pages, step.width)

    def update_indexer(self, key: Tensor) -> Tensor:
        """`update` for the index keys (B, Q, dim) of sparse attention, stored as (S, 1, C, dim)."""
        owner = self.owner
        if self.indexer_keys is None:
            self.indexer_keys = lazy_zeros((owner.num_stored, 1, owner.page_columns, key.shape[-1]), key)
        step, rows, new = owner.step, self.indexer_keys, key[:, None]
        if step.is_prefill:
            step.store(rows, new)
            return columns_of(rows, owner.pages_of(step.targets), step.width)[:, 0] if step.goes_on else key
        page, column = owner.row_place()
        rows[page, 0, column] = key[:, 0]
        return columns_of(rows, owner.row_pages(), step.width)[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.step.width, 0

    def get_seq_length(self) -> int:
        return self.owner.get_seq_length()

    def get_max_length(self) -> int:
        return self.owner.capacity

    def lazy_initialization(self, *_args: object, **_kwargs: object) -> None:
        """Does nothing: `update` allocates."""

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.keys, self.values, self.indexer_keys) if t is not None]


class StateRows:
    """Convolution and recurrent states of one layer, (S, ...) each. A prefill fills rows from prompts of one length; a
    decode step of B rows continues the first B slots, which models may also write in place.

    `conv_states`, `recurrent_states` and `has_previous_state` are what transformers' Cache reads.
    """

    is_compileable = False
    supports_early_init = False
    record_past = False

    def __init__(self, owner: SlotCache, index: int, kind: LayerKind) -> None:
        self.owner, self.index, self.number_of_states = owner, index, kind.num_states
        self.stored: dict[str, dict[int, Tensor | None]] = {
            name: dict.fromkeys(range(kind.num_states)) for name in ("conv", "recurrent")}

    def begin(self, is_prefill: bool) -> None:
        """A prefill starts from nothing; a decode step from what is stored."""
        empty, rows = dict.fromkeys(range(self.number_of_states)), len(self.owner.step.positions)
        self.conv_states, self.recurrent_states = (dict(empty) if is_prefill else {
            i: None if state is None else state[:rows] for i, state in self.stored[name].items()}
            for name in ("conv", "recurrent"))
        self.has_previous_state = dict.fromkeys(empty, not is_prefill)

    def _store(self, name: str, index: int, state: Tensor) -> Tensor:
        """Put states in their rows; returns the states that the model continues with."""
        if self.stored[name][index] is None:
            self.stored[name][index] = state.new_zeros(self.owner.num_slots, *state.shape[1:])
        rows, step = self.stored[name][index], self.owner.step
        if step.is_prefill:
            rows.index_copy_(0, step.targets, state.contiguous() if step.source is None else state[step.source])
            return state
        return rows[: len(state)].copy_(state)

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None,
                          **_kwargs: object) -> Tensor:
        """Append the new columns; keep the last conv_kernel_size and return all that the convolution covers."""
        if self.has_previous_state[state_idx]:
            kernel = self.conv_states[state_idx].shape[-1]
            window = torch.cat([self.conv_states[state_idx], conv_states], -1)
        else:
            kernel = conv_kernel_size or conv_states.shape[-1]
            window = nn.functional.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
            self.has_previous_state[state_idx] = True
        self._store("conv", state_idx, window[..., -kernel:])
        return window

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_kwargs: object) -> Tensor:
        return self._store("recurrent", state_idx, recurrent_states)

    def lazy_initialization(self, *_args: object, **_kwargs: object) -> None:
        """Does nothing: `_store` allocates."""

    def tensors(self) -> list[Tensor]:
        return [t for states in self.stored.values() for t in states.values() if t is not None]

    def clear(self, slots: Tensor) -> None:
        for states in self.stored.values():
            for state in states.values():
                if state is not None:
                    state.index_fill_(0, slots, 0)


class SlotCache:
    """The cache of all layers. fused_cache_write: layers whose decode columns the attention function writes.
    num_pages: how many pages the slots share; None: each slot is whole. steps: the recordings over this cache's
    tensors (cuda_graphs.py).
    """

    def __init__(self, kinds: list[LayerKind], num_slots: int, capacity: int, device: torch.device,
                 fused_cache_write: set[int], num_pages: int | None = None) -> None:
        self.num_slots, self.capacity = num_slots, capacity
        self.pages, self.num_stored, self.page_columns = None, num_slots, capacity
        if num_pages is not None:
            self.page_columns = page_size(device)
            per_slot = -(-capacity // self.page_columns)
            self.pages = Pages(num_slots, per_slot, max(num_pages, per_slot), self.page_columns, device)
            self.num_stored = self.pages.num_pages + 1
        self.steps = None
        self.fused_cache_write = fused_cache_write
        self.all_slots = torch.arange(num_slots, device=device)
        self.layer_class_to_replicate, self.offloading = None, False
        self._weak_self = weakref.proxy(self)  # for layers: a cycle would hold the memory until garbage collection
        self.layers = [_layer(self._weak_self, i, kind) for i, kind in enumerate(kinds)]
        self.step: Step | None = None

    def begin(self, step: Step) -> None:
        """Set the step of the next forward."""
        self.step = step
        if self.pages is not None:
            self.pages.sync()
            if step.is_prefill:
                self._place(step)
        for layer in self.layers:
            if isinstance(layer, StateRows):
                layer.begin(step.is_prefill)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object):  # noqa: ANN201
        while layer_idx >= len(self.layers):  # decoders cut from encoder-decoders count their layers elsewhere
            self.layers.append(_layer(self._weak_self, len(self.layers), _PLAIN))
        return self.layers[layer_idx].update(key, value, *args, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """MiniMax's name for the state of a layer; None in a prefill, which starts from nothing."""
        layer = self.layers[layer_idx]
        return layer.recurrent_states[0] if isinstance(layer, StateRows) else None

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        self.layers[layer_idx].update_recurrent_state(state)

    def _place(self, step: Step) -> None:
        """Say in which pages a prefill's tokens lie."""
        table, size = self.pages.table, self.page_columns
        if step.ragged is not None:
            row, place, slot, column = step.ragged
            step.ragged = (row, place, table[slot, column // size], column % size)
        else:
            columns = step.positions[0]
            step.grid = (table[step.targets[:, None], columns // size], columns % size)

    def pages_of(self, slots: Tensor) -> Tensor:
        """(B, N): the pages of slots (B,); one page of all columns where slots are whole."""
        return slots[:, None] if self.pages is None else self.pages.table[slots]

    def row_pages(self) -> Tensor:
        """The pages of each row of a decode step, (B, N)."""
        if self.step.pages is None:
            self.step.pages = self.pages_of(self.row_slots())
        return self.step.pages

    def row_place(self) -> tuple[Tensor, Tensor]:
        """Page and column there of each row's new token in a decode step."""
        if self.step.place is None:
            self.step.place = places_of(self.row_pages(), self.step.positions[:, 0], self.page_columns)
        return self.step.place

    def row_slots(self) -> Tensor:
        """The slot of each row of the step."""
        return self.all_slots[: len(self.step.positions)] if self.step.slots is None else self.step.slots

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the step's tokens, for models that count them instead of reading position_ids."""
        return self.step.width - self.step.positions.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.step.width, 0

    def copy_columns(self, source: int, targets: list[int], width: int) -> None:
        """Copy the first `width` columns of a slot to others, for a prompt that is stored already; over pages what is
        behind the whole ones, which they share."""
        if self.pages is not None:
            shared, width = width - width % self.page_columns, width % self.page_columns
            if not width:
                return
            source, *targets = (self.pages.page_of(slot, shared) for slot in (source, *targets))
        to = torch.tensor(targets, device=self.all_slots.device)
        for layer in self.layers:
            if isinstance(layer, KeyValueRows):
                for rows in KeyValueRows.tensors(layer):
                    view = rows.narrow(2, 0, width)
                    view.index_copy_(0, to, view[source].expand(len(targets), *view.shape[1:]))

    def clear_states(self, slots: Tensor) -> None:
        for layer in self.layers:
            if isinstance(layer, StateRows):
                layer.clear(slots)

    def num_bytes(self, is_growing: bool | None = None) -> int:
        """Bytes held: by what grows with the length (True), by the states (False), or by both. Of pages on a CPU those
        that have been used."""
        kinds = {True: (KeyValueRows,), False: (StateRows,), None: (KeyValueRows, StateRows)}[is_growing]
        tensors = [t for layer in self.layers for kind in kinds if isinstance(layer, kind) for t in kind.tensors(layer)]
        count = sum(t.numel() * t.element_size() for t in tensors)
        if self.pages is None or self.all_slots.device.type != "cpu":
            return count
        return count * (self.pages.most_used + 1) // self.num_stored


def _layer(owner: SlotCache, index: int, kind: LayerKind) -> object:
    if not kind.has_keys and not kind.num_states:
        return derived((_Nothing,), kind.base)()
    if kind.has_keys and kind.num_states:
        layer = derived((StateRows, KeyValueRows), kind.base)(owner, index, kind)
        KeyValueRows.__init__(layer, owner, index, kind)
        return layer
    return derived((KeyValueRows if kind.has_keys else StateRows,), kind.base)(owner, index, kind)


_PLAIN = LayerKind(True, 0, False, "CacheLayerMixin")


class _Nothing:
    """A layer that keeps nothing (an MLP, or one that reads another layer's keys)."""

    def __init__(self) -> None:
        self.keys = self.values = None
        self.is_initialized = True


def make_cache(model: nn.Module, num_slots: int, capacity: int, device: torch.device,
               fused_cache_write: set[int], num_pages: int | None = None) -> SlotCache:
    """An empty cache for `model`. Raises NotImplementedError for a model that brings a cache class of its own."""
    kinds = layer_kinds(model)
    return derived((SlotCache,), cache_class(model))(kinds, num_slots, capacity, device, fused_cache_write,
                                                     num_pages)


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on `device`, with what torch holds unused; None where that is unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch frees it at need
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_host_bytes()
