"""An engine's turn on the device: its own adapter active, its tensors there; while others work, both may be away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


class IdleOffload:
    """Moves what `tensors()` names off `device` and back.

    Whole storages move, and under the tensors that hold them: views into flat buffers, as DeepSpeed makes them of
    weights and gradients, and weights tied to each other stay what they were. While away, the tensors have no memory at
    all. On a CPU there is nowhere to go and nothing is done, unless `is_forced` (for tests).
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *,
                 is_forced: bool = False) -> None:
        self._tensors, self._device = tensors, device
        self._is_on = is_forced or device.type != "cpu"
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    @property
    def num_bytes_away(self) -> int:
        return sum(kept.nbytes() for _, kept in self._away)

    def leave(self) -> None:
        """Free the device's memory. Does nothing for what has left already."""
        if not self._is_on:
            return
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in self._tensors() if _is_on(t, self._device))
                    if s.nbytes()}
        for storage in storages.values():
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8,
                               pin_memory=self._device.type == "cuda").untyped_storage()
            kept.copy_(storage)
            self._away.append((storage, kept))
        for storage in storages.values():
            storage.resize_(0)

    def come_back(self) -> None:
        """Put every byte where it was read from."""
        for storage, kept in self._away:
            storage.resize_(kept.nbytes())
            storage.copy_(kept)
        self._away.clear()


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Weights, buffers and gradients of a module."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield tensor.data
        if tensor.grad is not None:
            yield tensor.grad


class Turn:
    """What holds while an engine computes: the context `adapter` (its low-rank adapter is the active one of a shared
    base), and its tensors on the device where `offload` is set, and the context `forms` (how its module computes)."""

    def __init__(self, adapter: Callable[[], AbstractContextManager] = nullcontext,
                 forms: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._adapter, self._forms, self._is_taken = adapter, forms, False
        self.offload: IdleOffload | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """The turn, for the block. Inside itself it does nothing."""
        if self._is_taken:
            yield
            return
        with self._adapter():
            if self.offload:
                self.offload.come_back()
            self._is_taken = True
            try:
                with self._forms():
                    yield
            finally:
                self._is_taken = False
                if self.offload:
                    self.offload.leave()
