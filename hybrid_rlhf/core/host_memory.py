"""The memory that the machine has left."""

from __future__ import annotations


def free_host_bytes() -> int | None:
    """Memory that programs can still have without swapping, or None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
