"""The machine as `doctor` finds it, and what others hold of its card."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import torch

from hybrid_rlhf import __version__
from hybrid_rlhf.commands import doctor
from hybrid_rlhf.commands.qualification.findings import FAILED, NOTE, PASSED, Row, Task

CARD = "card"  # the name of the row whose numbers describe it
_STATES = {"ok": PASSED, "warning": NOTE, "missing": FAILED}
_PLACES = "disk"  # findings about folders of the user's, which are nobody else's business


def environment(task: Task) -> Iterator[Row]:
    """What the card is, then doctor's findings."""
    numbers: dict = {"hybrid_rlhf": __version__, "torch": torch.__version__, "cuda": torch.version.cuda}
    if task.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(task.device)
        numbers |= {"name": torch.cuda.get_device_name(task.device), "bytes": total, "free": free,
                    "capability": list(torch.cuda.get_device_capability(task.device)), "driver": _ask("driver_version"),
                    "held_by_others": task.foreign_bytes}
        text = f"{numbers['name']}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free, driver {numbers['driver']}"
    else:
        text = "none; the processor takes its place"
    yield task.row(CARD, PASSED if task.device.type == "cuda" else NOTE, text, **numbers)
    for finding in doctor.examine(compile_kernels=False):
        found = finding.found.split(" free at ")[0] if finding.name.startswith(_PLACES) else finding.found
        cure = f" ({finding.cure})" if finding.cure else ""
        yield task.row(finding.name, _STATES[finding.state], found + cure)


def foreign_bytes() -> int | None:
    """Bytes of the card that other programs hold; None where nvidia-smi does not say. To be asked before this command's
    own processes use the card."""
    said = _ask("memory.used")
    return int(said) * 2**20 if said is not None and said.isdigit() else None


def _ask(what: str) -> str | None:
    """What nvidia-smi says of the first card that this process sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits", "-i", visible],
                              capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0].strip() if done.stdout.strip() else None
