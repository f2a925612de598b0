"""Peak memory of each phase, and what frees memory before a retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.memory import is_out_of_memory
from hybrid_rlhf.core.metrics import Metrics

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux; elsewhere there is no peak


class PeakMeter:
    """Peak bytes in use within blocks of code, which may nest: torch's allocations on an accelerator, the resident
    memory of the process on a CPU.

    Both are high-water marks that are reset at each block's beginning and end, so the peak of the whole run is
    `highest`, not the mark. On a CPU whose kernel refuses the reset, a block counts what is resident at its end; on a
    system without /proc it counts nothing.
    """

    def __init__(self) -> None:
        self._highest = self._reserved = 0
        self._running: list[list[int]] = []  # [peak so far] of each block

    @contextmanager
    def block(self, device: torch.device) -> Iterator[list[int]]:
        """[bytes], the peak once the block has ended; 0 where it is unknown."""
        self._take(device)
        peak = [0]
        self._running.append(peak)
        try:
            yield peak
        finally:
            self._take(device)
            self._running.pop()

    def highest(self, device: torch.device) -> int:
        """The peak since the process began."""
        self._take(device)
        return self._highest

    def highest_reserved(self, device: torch.device) -> int:
        """The most memory of a card that torch has reserved since the process began; 0 elsewhere."""
        self._take(device)
        return self._reserved

    def _take(self, device: torch.device) -> None:
        """Read the mark for all running blocks, and reset it."""
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(device))
            torch.cuda.reset_peak_memory_stats(device)
        else:
            peak = _resident("VmHWM")
            try:
                _CLEAR.write_text("5", encoding="ascii")
            except OSError:
                self._highest, peak = max(self._highest, peak), _resident("VmRSS")
        self._highest = max(self._highest, peak)
        for block_peak in self._running:
            block_peak[0] = max(block_peak[0], peak)


def _resident(name: str) -> int:
    """Bytes of an entry of this process's status: VmRSS (now) or VmHWM (the mark)."""
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(name + ":")).split()[1]) * 1024
    return 0


meter = PeakMeter()


@contextmanager
def peak_in(metrics: Metrics, name: str, device: torch.device) -> Iterator[None]:
    """Record the block's peak, in bytes, as `memory/{name}`; of blocks of one name, and of processes, the largest."""
    with meter.block(device) as peak:
        yield
    if peak[0]:
        metrics.add_spread(f"memory/{name}", torch.tensor([peak[0]], dtype=torch.float64), "max")


def release() -> None:
    """Collect the garbage of a failed pass and give cached blocks back to the device. Call it outside `except`, for a
    caught exception holds the frames that hold the tensors."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def fewer_slots(num_slots: int, capacity: int, error: BaseException) -> int:
    """Half of the slots of a cache that could not be allocated. Raises UserError where one slot is too many, and
    `error` itself if it is not about memory."""
    if not is_out_of_memory(error):
        raise error
    if num_slots <= 1:
        raise UserError(f"out of memory while generating: the cache of one request of {capacity} tokens does not fit; "
                        "shorten the prompt or max_new_tokens") from error
    return num_slots // 2
