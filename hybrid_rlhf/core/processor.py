"""Features of this computer's CPU."""

from __future__ import annotations

import platform
from pathlib import Path

_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # Linux's names, the fastest first
_CPUINFO = Path("/proc/cpuinfo")


def flags() -> str:
    """Linux's line of CPU features; the CPU's name on other systems."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def bf16_unit() -> str | None:
    """The unit that multiplies bfloat16: AMX or AVX512-BF16. None where it is emulated, which takes several times
    longer than float32, and on systems that do not say."""
    names = flags().split()
    return next((unit for flag, unit in _UNITS.items() if flag in names), None)


def bf16_line() -> str:
    """As text: what multiplies bfloat16, or that nothing does."""
    unit = bf16_unit()
    return f"{unit} multiplies bfloat16" if unit else f"no {' or '.join(_UNITS.values())}, so bfloat16 is emulated"
