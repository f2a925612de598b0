"""Activation of an engine: its adapter active and its tensors on the device; offloading while others work."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybrid_rlhf.core.torch_compat import num_writes

_ALIGNED = 512  # bytes


class _Place(NamedTuple):
    """Where in the host block a storage's bytes are, and its tensor's version (torch counts in-place writes)."""

    storage: torch.UntypedStorage
    offset: int
    size: int
    version: int | None  # None: of a tensor that training changes


class IdleOffload:
    """Moves the tensors of `tensors()` off `device` and back.

    Whole storages move, under the tensors that use them: views into flat buffers, as DeepSpeed makes them of weights
    and gradients, and tied weights stay what they were. While offloaded, the tensors have no memory at all. The CPU's
    side is one block, reused every time; weights that nothing trains are written to it once. On a CPU nothing is moved,
    unless `is_forced` (for tests). num_moves: how often all came back.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *,
                 is_forced: bool = False) -> None:
        self._tensors, self._device = tensors, device
        self._is_on = is_forced or device.type != "cpu"
        self._block: HostBlock | None = None
        self._places: dict[int, _Place] = {}  # by id() of the storages, which are held here
        self._is_away = False
        self.num_moves = 0

    @property
    def num_bytes_away(self) -> int:
        return sum(place.size for place in self._places.values()) if self._is_away else 0

    def leave(self) -> None:
        """Offload all tensors and free the device's memory. Does nothing where they are offloaded already."""
        if not self._is_on or self._is_away:
            return
        before, self._places = self._places, self._laid_out()
        size = sum(map(_room, self._places.values()))
        if self._block is None or len(self._block.bytes) < size:
            self._block = before = None  # the old one is freed before there is a new one
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
        """Move all tensors back to the device."""
        if not self._is_away or self._block is None:
            return
        for place in self._places.values():
            place.storage.resize_(place.size)
            _bytes_of(place.storage).copy_(self._block.part(place.offset, place.size), non_blocking=True)
        self._is_away = False
        self.num_moves += 1

    def readable(self, state: Any) -> Any:
        """`state`, of dicts, lists and tensors, with views of the host's copy for those that are offloaded."""
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
        """A place for each storage on the device: those that nothing trains first, so that their places last."""
        storages: dict[int, tuple[torch.UntypedStorage, int | None]] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                is_still = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
                _, version = storages.get(id(storage), (None, 0))
                version = version + num_writes(tensor) if is_still and version is not None else None
                storages[id(storage)] = storage, version
        places, offset = {}, 0
        for key, (storage, version) in sorted(storages.items(), key=lambda item: item[1][1] is None):
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


class Activation:
    """The context in which an engine computes: `adapter` (its low-rank adapter is the active one of a shared base), its
    tensors on the device where `offload` is set, and `forms` (how its module computes)."""

    def __init__(self, adapter: Callable[[], AbstractContextManager] = nullcontext,
                 forms: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._adapter, self._forms, self._is_active = adapter, forms, False
        self._is_resident = False
        self.offload: IdleOffload | None = None

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Activate for the block; inside itself it does nothing."""
        if self._is_active:
            yield
            return
        with self._adapter():
            if self.offload:
                self.offload.come_back()
            self._is_active = True
            try:
                with self._forms():
                    yield
            finally:
                self._is_active = False
                if self.offload and not self._is_resident:
                    self.offload.leave()

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Within the block the tensors come to the device once and stay there between activations."""
        if self.offload is None or self._is_active or self._is_resident:
            yield
            return
        self.offload.come_back()
        self._is_resident = True
        try:
            yield
        finally:
            self._is_resident = False
            self.offload.leave()


# -- Activation offload: what the backward pass needs is kept in CPU memory until then ---------------------------------


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
        kept.copy_(tensor, non_blocking=kept.is_pinned())  # it comes back on the same stream, after this
        moved["bytes"] += size
        return tensor.device, kept

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, kept = packed
        return kept.to(device, non_blocking=kept.is_pinned())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield moved


# -- Page-locked (pinned) CPU memory that a card copies to and from ----------------------------------------------------


_log = logging.getLogger(__name__)


class HostBlock:
    """`size` bytes, page-locked for a card, which then copies asynchronously and several times faster. Where the system
    refuses that (WSL2 and limits of locked memory allow little), the memory is pageable, with one warning.

    The size is as asked: torch's own page-locked memory is rounded up to a power of two, and kept when it is freed.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8)
        self.is_locked = size > 0 and device.type == "cuda" and _lock(self.bytes)
        if self.is_locked:  # the finalizer holds the memory until it is unlocked
            weakref.finalize(self, _unlock, torch.cuda.cudart(), self.bytes).atexit = False

    def part(self, offset: int, size: int) -> Tensor:
        """Bytes of the block, not a copy."""
        return self.bytes[offset: offset + size]


def pinned_like(tensor: Tensor) -> Tensor:
    """An empty CPU tensor in the form of `tensor`, page-locked where that is possible."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    except RuntimeError as error:
        _warn_once(tensor.numel() * tensor.element_size(), str(error).splitlines()[0])
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _lock(block: Tensor) -> bool:
    code = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.numel(), 0))
    if code:
        _warn_once(block.numel(), f"CUDA error {code}")
        _forget_error()
    return code == 0


def _unlock(runtime: Any, block: Tensor) -> None:
    runtime.cudaHostUnregister(block.data_ptr())


def _forget_error() -> None:
    """Clear CUDA's last error, for which the next kernel would be blamed."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


_reasons: set[str] = set()


def _warn_once(size: int, reason: str) -> None:
    if not _reasons:
        _log.warning("%.1f GiB of the computer's memory could not be page-locked (%s): what waits there takes longer "
                     "to come back", size / 2**30, reason)
    _reasons.add(reason)
