"""How fast a device is: bytes and operations per second, and the overhead of each operation; and what a card's process
takes beside its tensors.

For cards the published figures, times SHARES, which are assumed and not measured, or what qualify has measured.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hybrid_rlhf.core.own_files import write_file
from hybrid_rlhf.kernels.build import cache_folder
from hybrid_rlhf.memory_plan.operations import ATTENTION, FUSED, PASS, Operation

Points = tuple[tuple[float, float], ...]  # (size, rate) by size; between them the rate goes by the size's logarithm


@dataclass(frozen=True)
class Rates:
    """device: its display name. memory: bytes per second, by the bytes of an operation (a processor's caches are
    faster). products: operations per second of matrix products, by dtype and by their shortest side; product_start:
    seconds of overhead of each, by dtype; few_rows: the rates in decode steps, by number of rows, where they have
    kernels of their own. attention: operations per second, by dtype. passes: the most bytes per second of element-wise
    operations, by dtype (arithmetic, not memory). cache: bytes per second of a decode step's attention; draws: logits
    per second of sampling; scores: of log-probabilities, forward and backward (0: as passes over memory).

    launch: seconds of the host for an operation; gradient_launch: for one with gradients; overlaps: whether the device
    computes meanwhile; captures: whether decode steps are recorded, so that the host launches nothing. kernel: seconds
    that an operation takes at least; gap: between two of them. has_layers: whether a decode step takes whole layers in
    one operation. published: bytes per second of the data sheet (0: as measured).
    reached: the share of all of this that a whole phase reaches.
    """

    device: str
    memory: Points
    products: Mapping[str, Points]
    few_rows: Mapping[str, Points] = field(default_factory=dict)
    attention: Mapping[str, float] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=dict)
    product_start: Mapping[str, float] = field(default_factory=dict)
    cache: float = 0.0
    draws: float = 0.0
    scores: tuple[float, float] = (0.0, 0.0)
    launch: float = 0.0
    gradient_launch: float = 0.0
    overlaps: bool = False
    kernel: float = 0.0
    gap: float = 0.0
    captures: bool = False
    published: float = 0.0
    has_layers: bool = False
    reached: float = 1.0

    @classmethod
    def of(cls, stored: Mapping) -> Rates:
        """The rates from a dictionary that `stored` made, as JSON has it."""
        points = {name: {k: _points(v) for k, v in stored.get(name, {}).items()} for name in ("products", "few_rows")}
        scores = tuple(stored.get("scores", (0.0, 0.0)))
        return cls(**{**stored, "memory": _points(stored["memory"]), "scores": scores, **points})

    @property
    def peak_memory(self) -> float:
        """Bytes per second, the most of any long read."""
        return self.published or self.memory[-1][1]

    def stored(self) -> dict:
        return asdict(self)

    def seconds(self, operation: Operation, bits: float = 16, *, decodes: bool = False) -> float:
        """Seconds of one operation on the device, whose packed weights have `bits` each. decodes: in a decode step."""
        name = str(operation.dtype).removeprefix("torch.")
        size = operation.bytes + operation.packed * bits / 8
        moved, computed, start = size / at(self.memory, size), 0.0, 0.0
        if operation.kind in (PASS, FUSED):
            computed = operation.bytes / self.passes.get(name, math.inf)
        elif operation.kind == ATTENTION and name in self.attention:
            computed = operation.count / self.attention[name]
        elif operation.count:
            points = (self.few_rows if decodes else {}).get(name) or self.products.get(name) or self.products["float32"]
            computed = operation.count / at(points, operation.least)
            start = self.product_start.get(name, 0.0) if points is self.products.get(name) else 0.0
        return max(moved, computed, self.kernel) + self.gap + start

    def passed(self, size: float) -> float:
        """Seconds of moving so many bytes from and to memory."""
        return size / at(self.memory, size)

    def with_host(self, device: float, num_operations: float, *, has_gradients: bool = False,
                  is_captured: bool = False) -> float:
        """Seconds of operations that take `device` seconds on the device, the host's launches included."""
        if is_captured and self.captures:
            return device
        host = num_operations * (self.gradient_launch if has_gradients else self.launch)
        return max(device, host) if self.overlaps else device + host


def at(points: Points, size: float) -> float:
    """The rate at `size`; outside of the points, that of the nearest."""
    place = bisect_right(points, size, key=lambda p: p[0])
    if place == 0 or place == len(points):
        return points[0 if place == 0 else -1][1]
    (low, first), (high, second) = points[place - 1 : place + 1]
    share = math.log(size / low) / math.log(high / low)
    return math.exp(math.log(first) + share * (math.log(second) - math.log(first)))


def _points(stored: object) -> Points:
    return tuple((float(size), float(rate)) for size, rate in stored)  # type: ignore[attr-defined] - of JSON


@dataclass(frozen=True)
class CardFigures:
    """Published: GiB of memory, GB/s of it, dense tensor TFLOPS of bf16 or fp16 with sums in fp32, and TFLOPS of fp32
    (not tf32, which torch does not take unless told to). words: what a driver's name of the card contains."""

    name: str
    words: tuple[str, ...]
    gib: int
    bandwidth: float
    half: float
    single: float


# NVIDIA: Ampere GA102 architecture (3070, 3090), Ada architecture (4090) and RTX Blackwell architecture (5090) white
# papers, tables of specifications; A100 80GB SXM and H100 SXM data sheets, without sparsity. Of the 3060 and the 4060
# Ti, whose tensor rates stand in no white paper: SMs x 256 and x 512 operations a clock (as GA102's and AD102's) x
# boost clock.
CARDS = {
    "3060": CardFigures("RTX 3060 12GB", ("3060",), 12, 360, 25.5, 12.7),
    "3070": CardFigures("RTX 3070", ("3070",), 8, 448, 40.6, 20.3),
    "3090": CardFigures("RTX 3090", ("3090",), 24, 936, 71, 35.6),
    "4060ti": CardFigures("RTX 4060 Ti 16GB", ("4060 Ti",), 16, 288, 44.1, 22.1),
    "4090": CardFigures("RTX 4090", ("4090",), 24, 1008, 165.2, 82.6),
    "5090": CardFigures("RTX 5090", ("5090",), 32, 1792, 209.5, 104.8),
    "a100": CardFigures("A100 80GB", ("A100", "80GB"), 80, 2039, 312, 19.5),
    "h100": CardFigures("H100 80GB", ("H100",), 80, 3352, 989.4, 66.9),
}
# Assumed: of the bandwidth in a long read, of the tensor rate in large products, of it in attention; seconds of the
# host for an operation without and with gradients; seconds of the shortest kernel, and between two.
SHARES = {"memory": 0.85, "products": 0.7, "attention": 0.4, "launch": 7e-6, "gradient_launch": 10e-6, "kernel": 2e-6,
          "gap": 0.5e-6}


def rates_of_card(figures: CardFigures) -> Rates:
    """What a run may expect of a card: its published figures times SHARES."""
    half, single = (SHARES["products"] * 1e12 * rate for rate in (figures.half, figures.single))
    products = {"bfloat16": ((1, half),), "float16": ((1, half),), "float32": ((1, single),)}
    attention = {name: SHARES["attention"] / SHARES["products"] * points[0][1] for name, points in products.items()}
    return Rates(figures.name, ((1, SHARES["memory"] * 1e9 * figures.bandwidth),), products, attention=attention,
                 launch=SHARES["launch"], gradient_launch=SHARES["gradient_launch"], overlaps=True,
                 kernel=SHARES["kernel"], gap=SHARES["gap"], captures=True, published=1e9 * figures.bandwidth)


def figures_of(name: str) -> CardFigures | None:
    """The row of a card by the name that its driver gives it; a 3070 Ti or one of a laptop is not a 3070."""
    others = {"ti", "super", "laptop"} & set(name.lower().split())
    return next((c for c in CARDS.values() if all(w.lower() in name.lower() for w in c.words)
                 and others <= set(" ".join(c.words).lower().split())), None)


def cards_with(memory: int) -> list[CardFigures]:
    """Cards that have about `memory` bytes."""
    return [c for c in CARDS.values() if abs(memory / 2**30 / c.gib - 1) < 0.08]


# -- measured on this machine's card -----------------------------------------------------------------------------------


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


def write_calibration(values: dict) -> None:
    """Write `values` into the file atomically; its others stay."""
    path = _calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(_stored() | values, indent=1) + "\n")


def _stored() -> dict:
    path = _calibration_file()
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _calibration_file() -> Path:
    return cache_folder().parent / "calibration.json"
