"""The decode cache between two generations on a card: kept, with the graphs recorded over it, where memory allows.

Recording decode steps again takes longer than a short rollout. A cache is kept from the first optimizer step on, when
all lasting memory has been allocated, if it fits beside the peak of memory so far. If memory runs out nevertheless,
`give_back_idle` frees it before anything else is tried, and for good.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.device_memory import meter

_RESERVE = 0.07  # of a card: for fragmentation, and for longer batches than those so far
_holders: weakref.WeakSet[IdleCache] = weakref.WeakSet()


class IdleCache:
    """Holds a cache from the end of one inference mode to the beginning of the next."""

    def __init__(self) -> None:
        self._cache: SlotCache | None = None
        self._addresses: list[int] = []  # of the module's tensors that the recorded steps read
        self._was_kept = self._is_refused = False
        _holders.add(self)

    def keep(self, cache: SlotCache | None, module: nn.Module) -> None:
        """Keep `cache`, which was used in the mode of `module` that has ended, if it fits."""
        device = next(module.parameters()).device
        if device.type != "cuda" or cache is None or cache.steps is None or self._is_refused:
            return
        if self._was_kept or _has_room(cache.num_bytes(), device):
            self._cache, self._was_kept = cache, True
            self._addresses = _addresses(module)

    def take(self, module: nn.Module) -> SlotCache | None:
        """The kept cache, for the mode that begins; None where there is none, or where a weight has moved."""
        cache, self._cache = self._cache, None
        is_valid = cache is not None and self._addresses == _addresses(module)
        return cache if is_valid else None

    def give_back(self) -> bool:
        """Free the cache and keep none from now on; returns whether there was one."""
        is_freed, self._cache = self._cache is not None, None
        self._is_refused |= is_freed
        return is_freed


def give_back_idle() -> bool:
    """Free all idle caches after memory has run out; returns whether there were any."""
    freed = [holder.give_back() for holder in list(_holders)]
    return any(freed)


def _addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def _has_room(num_bytes: int, device: torch.device) -> bool:
    """Whether so many bytes fit beside the peak of memory so far."""
    free, total = torch.cuda.mem_get_info(device)
    ours = free + torch.cuda.memory_reserved(device) - _RESERVE * total
    return meter.highest(device) + num_bytes <= ours
