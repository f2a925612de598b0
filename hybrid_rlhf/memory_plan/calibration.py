"""What a plan adds to the tensors on a card: published and rounded up, or measured on this machine's card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hybrid_rlhf.core.config import UserError, check
from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.core.strict_json import loads
from hybrid_rlhf.kernels.build import cache_folder
from hybrid_rlhf.memory_plan.rates import Rates

FILE = "calibration.json"
_CURE = "measure it again by hybrid-rlhf qualify, or remove the file"


@dataclass(frozen=True)
class Calibration:
    """Beside the tensors of a process on a card.

    libraries_bytes: CUDA's context and what libraries load and hold: 1.2 GiB (H100, docs/results/gpu.md: 0.68 for a
    context and cuBLAS; after steps of GRPO with QLoRA 1.71, of which NCCL, not started for one process, had 0.55), of
    which what is free on a machine's own card, measured in a context, lacks a part already. fragmentation: what the
    allocator cannot use, as a share of the tensors' bytes (H100: 5%).
    """

    libraries_bytes: int = 12 * 2**30 // 10
    fragmentation: float = 0.07

    def __post_init__(self) -> None:
        size, share = self.libraries_bytes, self.fragmentation
        check(type(size) is int and size >= 0, f"libraries_bytes is {size!r}; it must be a number of bytes")
        check(type(share) in (int, float) and 0 <= share < 1, f"fragmentation is {share!r}; it must be from 0 to 1")


def read_calibration(folder: Path | None = None) -> Calibration:
    """What was measured here: calibration.json of the cache folder ($HYBRID_RLHF_CACHE, else ~/.cache/hybrid_rlhf), the
    published values for what it does not say; it may say more, for others. Raises UserError for a file that cannot be
    read, or with values that cannot be."""
    path, found = _stored(folder)
    try:
        return Calibration(**{name: found[name] for name in ("libraries_bytes", "fragmentation") if name in found})
    except UserError as error:
        raise UserError(f"{path}: {error}; {_CURE}") from error


def read_rates(device: str, folder: Path | None = None) -> Rates | None:
    """The rates that were measured of the card whose driver calls it `device`; None where none were. Raises UserError
    as read_calibration does."""
    path, found = _stored(folder)
    if found.get("device") != device or "rates" not in found:
        return None
    try:
        rates = Rates.of(found["rates"])
        rates.with_host(0.0, 0.0)
        return rates
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: rates are not what was measured; {_CURE}") from error


def write_calibration(values: dict, folder: Path | None = None) -> Path:
    """Put `values` into the file, whole; what else it says stays. Raises UserError for a file that cannot be read."""
    path, found = _stored(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(found | values, indent=1) + "\n")
    return path


def _stored(folder: Path | None) -> tuple[Path, dict]:
    path = (folder or cache_folder().parent) / FILE
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return path, {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}); {_CURE}") from error
    check(isinstance(found, dict), f"{path} is no table of names and values; {_CURE}")
    return path, found
