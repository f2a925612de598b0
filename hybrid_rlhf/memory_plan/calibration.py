"""What a plan adds to the tensors on a card: published values, rounded up, or measured on this machine's card."""

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
    """Memory of a process on a card beside its tensors.

    libraries_bytes: CUDA's context and what libraries load and hold: 1.2 GiB (H100, docs/results/gpu.md: 0.68 for a
    context and cuBLAS; after steps of GRPO with QLoRA 1.71, of which NCCL, not started for one process, had 0.55). The
    free memory of this machine's own card, which is measured in a context, lacks a part of that already. fragmentation:
    what the allocator cannot use, as a share of the tensors' bytes (H100: 5%).
    """

    libraries_bytes: int = 12 * 2**30 // 10
    fragmentation: float = 0.07

    def __post_init__(self) -> None:
        size, share = self.libraries_bytes, self.fragmentation
        check(type(size) is int and size >= 0, f"libraries_bytes is {size!r}; it must be a number of bytes")
        check(type(share) in (int, float) and 0 <= share < 1, f"fragmentation is {share!r}; it must be from 0 to 1")


def read_calibration(folder: Path | None = None) -> Calibration:
    """The values measured here, from calibration.json of the cache folder ($HYBRID_RLHF_CACHE, else
    ~/.cache/hybrid_rlhf), and published values for those that it lacks; it may hold more, for other readers. Raises
    UserError for a file that cannot be read, or with invalid values."""
    path, stored = _stored(folder)
    try:
        return Calibration(**{name: stored[name] for name in ("libraries_bytes", "fragmentation") if name in stored})
    except UserError as error:
        raise UserError(f"{path}: {error}; {_CURE}") from error


def read_rates(device: str, folder: Path | None = None) -> Rates | None:
    """The measured rates of the card with the driver's name `device`; None where there are none. Raises UserError as
    read_calibration does."""
    path, stored = _stored(folder)
    if stored.get("device") != device or "rates" not in stored:
        return None
    try:
        rates = Rates.of(stored["rates"])
        rates.with_host(0.0, 0.0)
        return rates
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: its rates are invalid; {_CURE}") from error


def write_calibration(values: dict, folder: Path | None = None) -> Path:
    """Write `values` into the file atomically; its others stay. Raises UserError for a file that cannot be read."""
    path, stored = _stored(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(stored | values, indent=1) + "\n")
    return path


def _stored(folder: Path | None) -> tuple[Path, dict]:
    path = (folder or cache_folder().parent) / FILE
    try:
        stored = loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return path, {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}); {_CURE}") from error
    check(isinstance(stored, dict), f"{path} is not a table of names and values; {_CURE}")
    return path, stored
