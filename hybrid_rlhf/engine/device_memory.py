"""Memory in use: the peak of each phase, and what is given back before another try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from hybrid_rlhf.core.config import UserError
from hybrid_rlhf.core.metrics import Metrics
from hybrid_rlhf.core.out_of_memory import is_out_of_memory

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux; elsewhere there is no peak


class PeakMeter:
    """The most bytes in use within blocks of code, which may nest: what torch has allocated on an accelerator, what is
    resident of the whole process on a CPU.

    Both are marks that are set back at each block's beginning and end, so whoever wants the peak of the whole run asks
    `highest` and not the mark. A CPU whose kernel refuses to set it back counts what is resident as the block ends;
    a system without /proc nothing.
    """

    def __init__(self) -> None:
        self._highest = self._reserved = 0
        self._running: list[list[int]] = []  # [peak so far] of each block

    @contextmanager
    def block(self, device: torch.device) -> Iterator[list[int]]:
        """[bytes], which holds the peak once the block has ended; 0 where there is none."""
        self._take(device)
        found = [0]
        self._running.append(found)
        try:
            yield found
        finally:
            self._take(device)
            self._running.pop()

    def highest(self, device: torch.device) -> int:
        """The peak since the process began."""
        self._take(device)
        return self._highest

    def highest_reserved(self, device: torch.device) -> int:
        """The most that torch has held of a card since the process began, for tensors and in reserve; 0 elsewhere."""
        self._take(device)
        return self._reserved

    def _take(self, device: torch.device) -> None:
        """Read the mark for all blocks that run, and set it back."""
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
        for found in self._running:
            found[0] = max(found[0], peak)


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
    with meter.block(device) as found:
        yield
    if found[0]:
        metrics.add_spread(f"memory/{name}", torch.tensor([found[0]], dtype=torch.float64), "max")


def release() -> None:
    """Collect what a failed pass left behind and give cached blocks back to the device. Call it outside `except`,
    for a caught exception holds the frames that hold the tensors."""
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
