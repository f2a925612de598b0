"""The decode cache between two generations on a card: kept, with the graphs recorded over it, where memory allows.

Recording decode steps anew takes longer than a short rollout. A cache is kept once an optimizer step has been made,
for then everything that stays has been allocated, if it fits beside the most memory that was in use so far. Where
memory runs out all the same, `give_back_idle` frees it before anything else is tried, and for good.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from hybrid_rlhf.engine.decode.kv_cache import SlotCache
from hybrid_rlhf.engine.device_memory import meter

_RESERVE = 0.07  # of a card: fragments, and batches that are longer than those so far
_holders: weakref.WeakSet[IdleCache] = weakref.WeakSet()


class IdleCache:
    """Holds a cache from the end of one inference mode to the beginning of the next."""

    def __init__(self) -> None:
        self._cache: SlotCache | None = None
        self._addresses: list[int] = []  # of what the recorded steps read of the module
        self._was_kept = self._is_refused = False
        _holders.add(self)

    def keep(self, cache: SlotCache | None, module: nn.Module) -> None:
        """The mode of `module` has ended, and `cache` was used in it."""
        device = next(module.parameters()).device
        if device.type != "cuda" or cache is None or cache.steps is None or self._is_refused:
            return
        if self._was_kept or _has_room(cache.num_bytes(), device):
            self._cache, self._was_kept = cache, True
            self._addresses = _addresses(module)

    def take(self, module: nn.Module) -> SlotCache | None:
        """The cache, for the mode that begins; None where there is none, or where a weight is elsewhere now."""
        cache, self._cache = self._cache, None
        is_valid = cache is not None and self._addresses == _addresses(module)
        return cache if is_valid else None

    def give_back(self) -> bool:
        """Free the cache, and keep none from now on; whether there was one."""
        held, self._cache = self._cache is not None, None
        self._is_refused |= held
        return held


def give_back_idle() -> bool:
    """Free all idle caches, for memory has run out; whether there were any."""
    freed = [holder.give_back() for holder in list(_holders)]
    return any(freed)


def _addresses(module: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def _has_room(num_bytes: int, device: torch.device) -> bool:
    """Whether so much fits beside the most that was in use so far."""
    free, total = torch.cuda.mem_get_info(device)
    ours = free + torch.cuda.memory_reserved(device) - _RESERVE * total
    return meter.highest(device) + num_bytes <= ours
