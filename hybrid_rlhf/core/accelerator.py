"""What this process computes on: its card or CPU, their 16-bit types, and a bound on memory where the system sets
none."""

from __future__ import annotations

import logging
import os
import platform
import re
from functools import cache
from pathlib import Path

import torch

from hybrid_rlhf.core.errors import check
from hybrid_rlhf.core.memory import CONFIGURED_BY, is_wsl

_log = logging.getLogger(__name__)

WSL_SHARE = 0.95  # of what is free at start
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1"))  # NVIDIA's on Linux, on WSL2


def device() -> torch.device:
    """The accelerator of this process, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cpu")


def keep_within_card() -> int | None:
    """On WSL2, bound the memory of the card that torch takes; returns the bytes, or None where nothing was set.

    A program that asks for more than the card has gets the computer's memory from Windows' driver, over the bus: no
    error, but everything is many times slower. With a bound torch's allocator fails instead, and smaller micro-batches,
    fewer slots or an error message follow as on Linux. The bound is 95% of what is free now: the rest is for code that
    libraries load later, which torch does not count, and for Windows' desktop. The user's own bound
    (per_process_memory_fraction in torch's variable) stays.
    """
    place = device()
    is_set = any("per_process_memory_fraction" in os.environ.get(name, "") for name in CONFIGURED_BY)
    if place.type != "cuda" or is_set or not is_wsl():
        return None
    free, total = torch.cuda.mem_get_info(place)
    unused = torch.cuda.memory_reserved(place)  # ours already, where this process has computed before
    bound = int(WSL_SHARE * free) + unused
    torch.cuda.set_per_process_memory_fraction(min(1.0, bound / total), place)
    return bound


def device_line() -> str:
    """The device line of a run's header: what it computes on and, where that is the CPU, why not on something else."""
    place = device()
    if place.type == "cpu":
        return f"device: the CPU; {why_no_card()}"
    total = torch.cuda.get_device_properties(place).total_memory / 2**30
    more = ["by ROCm, on which this has not been tried"] if torch.version.hip else []
    others = torch.cuda.device_count() - int(os.environ.get("WORLD_SIZE", 1))
    if others > 0:
        more.append(f"{others} more here, for torchrun --nproc_per_node {torch.cuda.device_count()}")
    if is_wsl():
        bound = torch.cuda.get_per_process_memory_fraction(place) * total
        more.append(f"WSL2: at most {bound:.1f} GiB of it, for beyond what is free Windows lends memory of its own")
    return "; ".join([f"device: {place}, {torch.cuda.get_device_name(place)}, {total:.1f} GiB", *more])


def why_no_card() -> str:
    """Why this process computes on the CPU."""
    named = f"torch {torch.__version__}"
    if torch.version.cuda or torch.version.hip:
        kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        if hidden is not None and not hidden.strip(" -1"):
            return f"CUDA_VISIBLE_DEVICES={hidden} hides the cards"
        return f"{named} is built for {kind} and finds no card (nvidia-smi or rocm-smi says what the driver sees)"
    if torch.backends.mps.is_available():
        return "the GPU of this Mac (MPS) is not supported: the kernels and the training of cards are for CUDA"
    if torch.xpu.is_available():
        return "the Intel GPU (XPU) is not supported: the kernels and the training of cards are for CUDA"
    if any(path.exists() for path in _DRIVERS):
        return (f"{named} is built without CUDA, and there is an NVIDIA driver: pip install torch --index-url "
                "https://download.pytorch.org/whl/cu130")
    return f"{named} is built without CUDA"


# -- the compute capability of an NVIDIA card: its 16-bit type, and whether this torch has kernels for it --------------


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
    _log.warning("%s", line)


# -- features of the CPU -----------------------------------------------------------------------------------------------


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
