"""The memory plan: bytes by role and phase, known before any weight is loaded.

A recipe says which roles there are and how large their micro-batches can become; this module counts. What is resident
follows from formulas (`state_bytes`, `cache_bytes`), what a forward and backward keep from the model's own code run on
tensors without memory (footprint.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from hybrid_rlhf.config import check
from hybrid_rlhf.engine.zero_config import lowest_stage
from hybrid_rlhf.models.load import ModelConfig
from hybrid_rlhf.run import footprint

KINDS = ("weights", "adapters", "optimizer", "gradients", "KV cache", "activations", "logits")
DOES_NOT_FIT = 3  # exit code of --plan
MAX_PREFILL_TOKENS = 4096  # of one forward, as in engine/scheduler.py
REDUCE_BUCKET = 50_000_000  # elements that DeepSpeed flattens at once

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True)
class Generation:
    """How a role samples: `slots` sequences at once, of at most prompt + response tokens each."""

    slots: int
    prompt: int
    response: int


@dataclass(frozen=True)
class Role:
    """One model of a run. length: tokens of the longest row; rows: rows of that length in the largest micro-batch.

    predicted: tokens of a row that get a log-probability (0 for a scalar model), in training with their entropy if
    `entropy`. trains: whether an optimizer moves it. scores: whether it is asked for numbers between generation and
    update. base: the role whose weights it shares. has_average: whether a moving average of its weights is kept.
    """

    name: str
    model: ModelConfig
    length: int
    rows: int
    predicted: int = 0
    trains: bool = False
    scores: bool = True
    entropy: bool = False
    dropout: bool = False
    zero_stage: int | None = None
    generation: Generation | None = None
    base: str | None = None
    has_average: bool = False

    @property
    def is_scalar(self) -> bool:
        return self.predicted == 0


@dataclass(frozen=True)
class Line:
    """Bytes of one kind for one role, by phase; a phase that is not named has none."""

    role: str
    kind: str
    phases: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """What a run needs on its device. available: bytes that it may use (None: unknown)."""

    title: str
    phases: tuple[str, ...]
    lines: tuple[Line, ...]
    available: int | None
    notes: tuple[str, ...] = field(default=())

    def total(self, phase: str) -> int:
        """Roles score one after another, so of what scoring takes and gives back the largest counts."""
        passing: dict[str, int] = {}
        for line in self.lines:
            if line.kind in ("activations", "logits"):
                passing[line.role] = passing.get(line.role, 0) + line.phases.get(phase, 0)
        staying = sum(x.phases.get(phase, 0) for x in self.lines if x.kind not in ("activations", "logits"))
        return staying + max(passing.values(), default=0)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 or less where it fits, or where nobody knows what there is."""
        return self.peak - self.available if self.available is not None else 0


@dataclass(frozen=True)
class StateBytes:
    """Bytes beside the weights that training `count` parameters takes on one process.

    optimizer: always there; gradients: while micro-batches run; closing: at the end of the last backward, when the
    gradients are reduced and activations are gone; stepping: during the optimizer's step, gradients included.
    """

    optimizer: int
    gradients: int
    closing: int
    stepping: int


def state_bytes(count: int, dtype: torch.dtype, zero_stage: int | None, world: int = 1) -> StateBytes:
    """AdamW under DeepSpeed 0.19, as measured (benchmarks/memory.py; one process, bytes per parameter):

        dtype  ZeRO  optimizer             gradients  closing  step
        fp32   0     8 (two moments)       4          4        4
        fp32   1     12 (moments, master)  4          8        8
        fp32   2     12                    4          12       8
        bf16   0     16 (and fp32 sums)    0          0        0
        16-bit 1     12                    2          4        8
        16-bit 2     12                    2          6        8

    Over `world` processes ZeRO 1 divides optimizer and step, ZeRO 2 and 3 the gradients too (ZeRO, 1910.02054, section
    5), and ZeRO 0 flattens a bucket at closing. bf16 at ZeRO 0 is ours (engine/masters.py); where one
    micro-batch is all, it is 12, and 2 of gradients. Buckets that DeepSpeed flattens hold at most 5e7 elements.
    """
    stage = zero_stage if zero_stage is not None else lowest_stage(dtype, world)
    size = dtype.itemsize
    bucket = min(count, REDUCE_BUCKET) * size
    if stage == 0 and dtype != torch.float32:
        return StateBytes(16 * count, 0, 0, 0)
    if stage == 0:
        return StateBytes(8 * count, size * count, size * count + (bucket if world > 1 else 0), size * count)
    parts = world if stage >= 2 else 1
    return StateBytes(12 * count // world, size * count // parts, size * count // parts + (1 + (stage >= 2)) * bucket,
                      8 * count // world)


def make_plan(title: str, roles: Iterable[Role], device: torch.device, available: int | None, world: int = 1,
              notes: Iterable[str] = (), *, is_exact: bool = True) -> Plan:
    """Count everything that `roles` need; reads configurations only. Raises UserError where one cannot be read.

    is_exact False: see footprint.activations.
    """
    roles = list(roles)
    phases = _phases(roles)
    resident = ("weights", "adapters", "optimizer")
    lines = []
    for role in roles:
        kinds = _role_bytes(role, device, world, is_exact)
        for kind in KINDS:
            found = dict.fromkeys(phases, kinds[kind]["always"]) if kind in resident else kinds[kind]
            if any(found.values()):
                lines.append(Line(role.name, kind, found))
    return Plan(title, phases, tuple(lines), available, tuple(notes))


def _phases(roles: list[Role]) -> tuple[str, ...]:
    """Phases of one step, in order."""
    first = [*(["generate"] if any(r.generation for r in roles) else []), "score"]
    first = first if any(r.scores for r in roles) else first[:-1]
    return (*first, *(f"{verb} {r.name}" for r in roles if r.trains for verb in ("train", "step")))


def _role_bytes(role: Role, device: torch.device, world: int, is_exact: bool) -> dict[str, dict[str, int]]:
    """kind -> phase -> bytes; "always" stands for every phase."""
    sizes = footprint.sizes(role.model, device, is_scalar=role.is_scalar)
    found: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    found["weights"]["always"] = 0 if role.base else sizes.weight_bytes
    found["adapters"]["always"] = sizes.adapter_bytes
    found["optimizer"]["always"] = 0
    act = footprint.activations(role.model, device, role.rows, role.length, dropout=role.dropout, trains=role.trains,
                                is_exact=is_exact)
    if role.trains:
        _add_training(found, role, act, sizes, device, world)
    if role.scores:
        found["activations"]["score"] = act.scoring
        if role.predicted:
            found["logits"]["score"] = footprint.logit_bytes(role.model, device, role.rows * role.predicted,
                                                             trains=False)
    if role.generation:
        _add_generation(found, role, act, sizes, device)
    return found


def _add_training(found: dict, role: Role, act: footprint.Activations, sizes: footprint.Sizes, device: torch.device,
                  world: int) -> None:
    """A micro-batch takes the most at one of three moments: in the head, when all activations are there; in the
    backbone's backward, when the head's are gone; and at the end, when gradients are reduced and activations gone."""
    state = state_bytes(sizes.trained, sizes.trained_dtype, role.zero_stage, world)
    train, step = f"train {role.name}", f"step {role.name}"
    logits = 0
    if role.predicted:
        logits = footprint.logit_bytes(role.model, device, role.rows * role.predicted, trains=True,
                                       entropy=role.entropy)
    kept = max(act.saved, act.peak - logits)
    average = 4 * sizes.trained // (world if role.zero_stage else 1) if role.has_average else 0
    found["optimizer"]["always"] = state.optimizer + average
    found["activations"][train], found["logits"][train] = kept, logits
    found["gradients"][train] = max(state.gradients, state.closing - kept - logits)
    found["gradients"][step] = state.stepping


def _add_generation(found: dict, role: Role, act: footprint.Activations, sizes: footprint.Sizes,
                    device: torch.device) -> None:
    """The cache of all slots at full length; a prefill, which takes per token what scoring takes; one row of logits per
    slot, in the model's dtype and in fp32."""
    sampling = role.generation
    tokens = min(sampling.slots * sampling.prompt, max(MAX_PREFILL_TOKENS, sampling.prompt))
    per_token, per_sequence = footprint.cache_bytes(role.model, device)
    found["KV cache"]["generate"] = sampling.slots * (per_token * (sampling.prompt + sampling.response) + per_sequence)
    found["activations"]["generate"] = round(act.scoring * tokens / (role.rows * role.length))
    found["logits"]["generate"] = sampling.slots * sizes.vocab * (4 + sizes.itemsize)


def parse_bytes(text: str, option: str) -> int:
    """'24GiB', '24 GB', '512M' or a plain number of bytes -> bytes. Raises UserError that names `option`.

    K, M, G, T and KiB... count by 1024; kB, MB, GB, TB by 1000.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = found and found.group(2).lower()
    check(found is not None and unit in _UNITS,
          f"{option} {text!r} is no amount of memory; write a number and a unit, such as 24GiB, 24GB or 800MiB")
    size = int(float(found.group(1)) * _UNITS[unit])
    check(size > 0, f"{option} {text!r} is no memory at all; write a positive amount such as 24GiB")
    check(unit != "" or size >= 2**20, f"{option} {text!r} is {size} bytes; a unit is missing, as in {text.strip()}GiB")
    return size


def size_text(size: float) -> str:
    """Bytes for people: '1.5 GiB', '300 MiB', '12 KiB'."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if size >= 2**power * (1 if power > 20 else 0.1):
            value = size / 2**power
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{size / 2**10:.0f} KiB"
