"""Counts the bytes of storages while they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybrid_rlhf.core import torch_compat


class LiveBytes(torch_compat.dispatch_mode()):
    """Counts the storages that operations make within the block, while they live. now, peak: bytes. on_operation:
    called with each operation, its inputs (in place and by name) and its outputs."""

    def __init__(self, known: tuple[Tensor, ...] = (), on_operation: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._on_operation = on_operation
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._known = {id(tensor.untyped_storage()) for tensor in known}
        for tensor in known:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Callable, types, inputs=(), named=None):  # noqa: ANN001, ANN204
        out = func(*inputs, **(named or {}))
        if self._on_operation:
            self._on_operation(func, inputs, named or {}, out)
        for leaf in torch_compat.leaves_of(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return out

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key = id(storage)  # which lives as long as its storage
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._drop, key)
        if key not in self._known:
            self.now += size - self._sizes[key]  # resize_ lets a storage grow
            self._sizes[key] = size
            self.peak = max(self.peak, self.now)

    def _drop(self, key: int) -> None:
        self._known.discard(key)
        self.now -= self._sizes.pop(key, 0)


@contextmanager
def counting(model: nn.Module, on_operation: Callable[..., None] | None = None) -> Iterator[LiveBytes]:
    """Count within the block what is made beside the model itself and its gradients. on_operation: as in LiveBytes."""
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with LiveBytes(tuple(known), on_operation) as live:
        yield live
