"""An engine's turn on the device: its own adapter active, its tensors there; while others work, both may be away."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rlhf.engine.train.host_block import HostBlock

_ALIGNED = 512  # bytes


class _Place(NamedTuple):
    """Where in the block a storage's bytes are, and of which version of its tensor: torch counts what is written."""

    storage: torch.UntypedStorage
    offset: int
    size: int
    version: int | None  # None: of a tensor that training changes


class IdleOffload:
    """Moves what `tensors()` names off `device` and back.

    Whole storages move, and under the tensors that hold them: views into flat buffers, as DeepSpeed makes them of
    weights and gradients, and weights tied to each other stay what they were. While away, the tensors have no memory at
    all. The CPU's side is one block for all turns; weights that nothing trains are written to it once. On a CPU there
    is nowhere to go and nothing is done, unless `is_forced` (for tests). num_moves: how often all came back.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *,
                 is_forced: bool = False) -> None:
        self._tensors, self._device = tensors, device
        self._is_on = is_forced or device.type != "cpu"
        self._block: HostBlock | None = None
        self._places: dict[int, _Place] = {}  # by the identity of storages, which live as long as they are held here
        self._is_away = False
        self.num_moves = 0

    @property
    def num_bytes_away(self) -> int:
        return sum(place.size for place in self._places.values()) if self._is_away else 0

    def leave(self) -> None:
        """Free the device's memory. Does nothing for what has left already."""
        if not self._is_on or self._is_away:
            return
        before, self._places = self._places, self._laid_out()
        size = sum(map(_room, self._places.values()))
        if self._block is None or len(self._block.bytes) < size:
            self._block = before = None  # the old one is given back before there is a new one
            self._block = HostBlock(size, self._device)
        for key, place in self._places.items():
            if place.version is None or not before or not _is_same(before.get(key), place):
                self._block.part(place.offset, place.size).copy_(_bytes_of(place.storage), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # from here on the block may be read
        for place in self._places.values():
            place.storage.resize_(0)
        self._is_away = True

    def come_back(self) -> None:
        """Put every byte where it was read from."""
        if not self._is_away or self._block is None:
            return
        for place in self._places.values():
            place.storage.resize_(place.size)
            _bytes_of(place.storage).copy_(self._block.part(place.offset, place.size), non_blocking=True)
        self._is_away = False
        self.num_moves += 1

    def readable(self, state: Any) -> Any:
        """`state`, of dicts, lists and tensors; those that are away by their numbers in the CPU's memory, no copies."""
        if isinstance(state, dict):
            return {name: self.readable(value) for name, value in state.items()}
        if isinstance(state, (list, tuple)):
            return [self.readable(value) for value in state]
        return self._readable(state) if isinstance(state, Tensor) else state

    def _readable(self, tensor: Tensor) -> Tensor:
        place = self._places.get(id(tensor.untyped_storage())) if self._is_away else None
        if place is None or self._block is None:
            return tensor
        numbers = self._block.part(place.offset, place.size).view(tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride(), numbers.storage_offset() + tensor.storage_offset())

    def _laid_out(self) -> dict[int, _Place]:
        """A place for each storage on the device: those that nothing trains first, so that theirs stay the same."""
        found: dict[int, tuple[torch.UntypedStorage, int | None]] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                is_still = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
                _, version = found.get(id(storage), (None, 0))
                found[id(storage)] = storage, (version + tensor._version if is_still and version is not None else None)
        places, offset = {}, 0
        for key, (storage, version) in sorted(found.items(), key=lambda item: item[1][1] is None):
            places[key] = _Place(storage, offset, storage.nbytes(), version)
            offset += _room(places[key])
        return places


def _is_same(before: _Place | None, place: _Place) -> bool:
    return before is not None and before.storage is place.storage and before[1:] == place[1:]


def _room(place: _Place) -> int:
    return -(-place.size // _ALIGNED) * _ALIGNED


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def module_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Weights, buffers and gradients of a module."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad


class Turn:
    """What holds while an engine computes: the context `adapter` (its low-rank adapter is the active one of a shared
    base), and its tensors on the device where `offload` is set, and the context `forms` (how its module computes)."""

    def __init__(self, adapter: Callable[[], AbstractContextManager] = nullcontext,
                 forms: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._adapter, self._forms, self._is_taken = adapter, forms, False
        self._is_kept = False
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
                if self.offload and not self._is_kept:
                    self.offload.leave()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within the block the tensors come to the device once and stay there between turns."""
        if self.offload is None or self._is_taken or self._is_kept:
            yield
            return
        self.offload.come_back()
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False
            self.offload.leave()
