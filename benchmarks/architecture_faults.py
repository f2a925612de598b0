"""Things to break on purpose, one at a time: what a probe must notice before it may be trusted with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.decode.attention import SlotAttention
from hybrid_rlhf.engine.decode.kv_cache import StateRows


@contextmanager
def hidden_column(_model: nn.Module) -> Iterator[None]:
    """The mask hides the second token of every sequence from all later ones."""
    true_mask = SlotAttention.bool_mask

    def narrow(self: SlotAttention, **named: object) -> Tensor:
        seen = true_mask(self, **named)
        positions = self.cache.step.positions[:, None, :, None]
        return seen & ~((torch.arange(seen.shape[-1]) == 1) & (positions > 1))

    with mock.patch.object(SlotAttention, "bool_mask", narrow), \
            mock.patch.object(SlotAttention, "mask", lambda self, **named: narrow(self, **named)):
        yield


@contextmanager
def doubled_positions(model: nn.Module) -> Iterator[None]:
    """Token i is told that it stands at 2 i. (A shift of all by the same would be right for relative positions.)"""

    def double(_module: nn.Module, inputs: tuple, named: dict) -> tuple[tuple, dict]:
        if isinstance(named.get("position_ids"), Tensor):  # the plain forward is given none
            named = named | {"position_ids": named["position_ids"] * 2}
        return inputs, named

    hook = model.base_model.register_forward_pre_hook(double, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def exchanged_states(_model: nn.Module) -> Iterator[None]:
    """Before every decode step each slot gets the state of its neighbour."""
    begin = StateRows.begin

    def exchange(self: StateRows, is_prefill: bool) -> None:
        if not is_prefill:
            for state in StateRows.tensors(self):
                state.copy_(state.roll(1, 0))
        begin(self, is_prefill)

    with mock.patch.object(StateRows, "begin", exchange):
        yield


FAULTS: dict[str, Callable] = {"mask": hidden_column, "positions": doubled_positions, "states": exchanged_states}
