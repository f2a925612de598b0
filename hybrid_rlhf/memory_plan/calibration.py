"""What a plan adds to the tensors on a card: published values, rounded up, or measured on this machine's card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.kernels.build import cache_folder
from hybrid_rlhf.memory_plan.rates import Rates

FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Memory of a process on a card beside its tensors.

    libraries_bytes: CUDA's context and what libraries load and hold: 1.2 GiB (H100, docs/results/gpu.md: 0.68 for a
    context and cuBLAS; after steps of GRPO with QLoRA 1.71, of which NCCL, not started for one process, had 0.55). The
    free memory of this machine's own card, which is measured in a context, lacks a part of that already. fragmentation:
    what the allocator cannot use, as a share of the tensors' bytes (H100: 5%).
    """

    libraries_bytes: int = 12 * 2**30 // 10
    fragmentation: float = 0.07


def read_calibration() -> Calibration:
    """The values measured here, from calibration.json of the cache folder ($HYBRID_RLHF_CACHE, else
    ~/.cache/hybrid_rlhf), and published values for those that it lacks."""
    stored = _stored()
    return Calibration(**{name: stored[name] for name in ("libraries_bytes", "fragmentation") if name in stored})


def read_rates(device: str) -> Rates | None:
    """The measured rates of the card with the driver's name `device`; None where there are none."""
    stored = _stored()
    return Rates.of(stored["rates"]) if stored.get("device") == device and "rates" in stored else None


def write_calibration(values: dict) -> Path:
    """Write `values` into the file atomically; its others stay."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(_stored() | values, indent=1) + "\n")
    return path


def _stored() -> dict:
    path = _path()
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _path() -> Path:
    return cache_folder().parent / FILE
