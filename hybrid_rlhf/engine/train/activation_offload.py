"""Activation offload: what the backward pass needs is kept in CPU memory until then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.train.host_block import pinned_like

MIN_BYTES = 65536  # a transfer of less costs more time than its memory is worth


@contextmanager
def saved_on_cpu(module: nn.Module, min_bytes: int = MIN_BYTES) -> Iterator[dict[str, int]]:
    """Activations that the block saves for its backward pass go to the CPU (pinned, if there is an accelerator).

    With gradient checkpointing these are the inputs of the layers. The weights of `module` stay where they are. Yields
    {"bytes": how many were moved}. A tensor that is on the CPU already is copied, which is correct but useless.
    """
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    moved = {"bytes": 0}

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        size = tensor.numel() * tensor.element_size()
        if size < min_bytes or not tensor.is_floating_point() or tensor.untyped_storage().data_ptr() in weights:
            return tensor
        kept = pinned_like(tensor)
        kept.copy_(tensor)
        moved["bytes"] += size
        return tensor.device, kept

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, kept = packed
        return kept.to(device, non_blocking=kept.is_pinned())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield moved
