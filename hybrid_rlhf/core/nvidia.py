"""The compute capability of an NVIDIA card: its 16-bit type, and whether this build of torch has kernels for it."""

from __future__ import annotations

import logging
import re
from functools import cache

import torch

from hybrid_rlhf.core.errors import check

_log = logging.getLogger(__name__)

AMPERE = (8, 0)  # the first with matrix units for bfloat16
TURING = (7, 5)  # the oldest for which builds for CUDA 13 have kernels
WHEELS = "https://download.pytorch.org/whl/"


def capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) of the card; None for a CPU, another vendor's card, and a card that is not here."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def lacks_kernels(device: torch.device) -> tuple[str, str] | None:
    """(what is wrong, what would fit) where this build of torch has no kernels for the card; None where it has."""
    card, built = capability(device), torch.cuda.get_arch_list()
    if card is None or not built or any(_runs(name, card) for name in built):
        return None
    fitting = "cu126" if card < TURING else "cu130"
    return (f"{_described(device, card)} has no kernels in torch {torch.__version__}, which is built for "
            f"{', '.join(built)}", f"pip install --force-reinstall torch --index-url {WHEELS}{fitting}")


def _runs(built: str, card: tuple[int, int]) -> bool:
    """Whether a card runs kernels built for a name: sm_86 on 8.6 and 8.9, sm_90a on 9.0, compute_120 from 12.0 on."""
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", built)
    if not parts:
        return False
    kind, suffix, least = parts[1], parts[4], (int(parts[2]), int(parts[3]))
    if kind == "compute":
        return card >= least
    return card == least if suffix == "a" else card[0] == least[0] and card >= least


def check_kernels(device: torch.device) -> None:
    """UserError where this build of torch has no kernels for the card; does nothing for other devices than NVIDIA's."""
    lacking = lacks_kernels(device)
    check(lacking is None, "; ".join(lacking or ()))


def automatic_dtype(device: torch.device) -> torch.dtype:
    """The default dtype of a model: bfloat16, or float16 (with a warning) on NVIDIA cards before Ampere, which compute
    bfloat16 by emulation."""
    card = capability(device)
    if card is None or card >= AMPERE:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    _warn_once(f"model.dtype auto is float16 here: {_described(device, card)} computes bfloat16 by emulation only")
    return torch.float16


def warn_of_emulation(dtype: torch.dtype, device: torch.device) -> None:
    """Warn where a chosen bfloat16 is emulated: results are right, but slow."""
    card = capability(device)
    if dtype == torch.bfloat16 and card is not None and card < AMPERE:
        _warn_once(f"model.dtype bfloat16 is slow here: {_described(device, card)} computes it by emulation only; "
             "float16 is its own 16-bit type")


def _described(device: torch.device, card: tuple[int, int]) -> str:
    return f"{torch.cuda.get_device_name(device)} (compute capability {card[0]}.{card[1]})"


@cache
def _warn_once(line: str) -> None:
    """Each line once per process."""
    _log.warning("%s", line)
