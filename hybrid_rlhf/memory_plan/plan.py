"""The memory plan: bytes by role and phase, known before any weight is loaded.

A recipe says which roles there are and how large their micro-batches can become; this module counts. Resident memory
follows from formulas (`state_bytes`, `cache_bytes`), that of a forward and backward from the model's own code run on
tensors without memory (trace.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch

from hybrid_rlhf.engine.decode.cuda_graphs import STEPS_PER_LOOK
from hybrid_rlhf.engine.decode.pages import NUM_PAGED, page_size
from hybrid_rlhf.engine.train.zero_config import OFFLOADS, lowest_stage
from hybrid_rlhf.memory_plan import trace
from hybrid_rlhf.memory_plan.rates import Calibration
from hybrid_rlhf.models import saving, shapes
from hybrid_rlhf.models.images import KEPT_FEATURES
from hybrid_rlhf.models.load import ModelConfig

KINDS = ("weights", "adapters", "optimizer", "gradients", "gathered", "KV cache", "kept words", "targets",
         "activations", "logits")
PASSING = ("gathered", "activations", "logits")  # freed before the next role computes
GENERATE = "generate"  # the phase in which the actor samples
EXPORT = "export"  # the phase behind the last step
DOES_NOT_FIT = 3  # exit code of --plan
MAX_PREFILL_TOKENS = 4096  # of one forward, as in engine/decode/scheduler.py
MAX_LIVE = 10**9  # elements that ZeRO 3 keeps gathered for their next use
# Memory of libraries on a CPU: 33 MB of products that oneDNN compiles for the shapes it meets, 13 of modules, the rest
# in the heap between small tensors (docs/results/memory.md). On a card: Calibration in rates.py.
LIBRARIES = {"cpu": 64 << 20}
INTERPRETER = "not counted: Python and its libraries, about 0.5 GiB, which a run's own figure of its memory holds"
IMAGES = ("not counted: what rows with images take beside the model's weights: the features that a step keeps, "
          f"{KEPT_FEATURES >> 30} GiB at most, and one pass over the towers at a time, of about 1.4 megapixels")


@dataclass(frozen=True)
class Generation:
    """How a role samples: `slots` sequences at once, of at most prompt + response tokens each, over `tp` processes
    that each have a part of the heads; on a card more of them in the same memory, over pages (`at_once`). sequences:
    of a step (0: not known). phase: in which it samples: a judge writes while responses are scored. keeps: whether it
    records the candidate tokens of truncated sampling."""

    slots: int
    prompt: int
    response: int
    tp: int = 1
    sequences: int = 0
    phase: str = GENERATE
    keeps: bool = False

    def is_short(self, device: torch.device) -> bool:
        """Whether a sequence has no more than a page, so that each takes a whole slot."""
        return self.prompt + self.response <= page_size(device)

    def at_once(self, device: torch.device, group: int, has_states: bool) -> int:
        """Sequences of full length decoded at once, of which a group has its prompt in common."""
        if device.type != "cuda" or has_states:
            return self.slots
        if self.is_short(device):
            return max(self.slots, min(NUM_PAGED, self.sequences))
        shared = -(-self.prompt // group) + self.response  # tokens of a sequence, its share of the prompt's among them
        in_pages = self.slots * (self.prompt + self.response) // shared
        return max(self.slots, min(NUM_PAGED, self.sequences, in_pages))


@dataclass(frozen=True)
class Role:
    """One model of a run. length: tokens of the longest row; rows: rows of that length in the largest micro-batch.

    predicted: tokens of a row that get a log-probability (0 for a scalar model), in training with their entropy if
    `entropy`. trains: whether an optimizer steps it. scores: whether it computes something between generation and
    update. base: the role whose weights it shares; is_shared: whether any other computes on its weights. offload: as
    engine.offload. waits: whether all of it is in the CPU's memory while others compute. labels: of a classifier that
    is not a decoder of ours (0: not one). has_average: whether a moving average of its weights is kept. texts: (rows,
    length) of other rows that it trains on as well (a teacher: reads as well), each token of which gets a
    log-probability and no entropy. teacher: whose logits are computed beside its own in training. Of a teacher:
    keeps_head: its hidden states wait in the CPU's memory, and its head stays on the device; only_states: no
    log-probabilities are computed; top_k: its most likely tokens wait there instead.

    For the time of a step: scored, trained: rows that it scores and trains on, each pass over them counted; updates:
    optimizer steps; group: rows that share a prompt.
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
    is_shared: bool = False
    optim: str = "adamw"
    offload: tuple[str, ...] = ()
    waits: bool = False
    labels: int = 0
    has_average: bool = False
    texts: tuple[int, int] | None = None
    teacher: Role | None = None
    keeps_head: bool = False
    only_states: bool = False
    top_k: int = 0
    scored: int = 0
    trained: int = 0
    updates: int = 1
    group: int = 1

    @property
    def is_scalar(self) -> bool:
        return self.predicted == 0


@dataclass(frozen=True)
class Line:
    """Bytes of one kind for one role, by phase; a phase that is not named has none. passes: whether they are freed
    before the next role computes."""

    role: str
    kind: str
    phases: dict[str, int]
    passes: bool = False


@dataclass(frozen=True)
class Plan:
    """The memory that a run needs on one process's device. available: bytes that it may use (None: unknown). host:
    bytes that offloading keeps in the CPU's memory, for this process. roles: the plan's inputs; steps: of the run, if
    known; timed: the roles at the data's mean lengths, where they are known."""

    title: str
    phases: tuple[str, ...]
    lines: tuple[Line, ...]
    available: int | None
    notes: tuple[str, ...] = field(default=())
    host: int = 0
    roles: tuple[Role, ...] = field(default=(), repr=False)
    steps: int | None = None
    timed: tuple[Role, ...] = field(default=(), repr=False)

    def total(self, phase: str) -> int:
        """Bytes in a phase. Roles score one after another, so of memory that scoring frees again the largest counts."""
        passing: dict[str, int] = {}
        for line in self.lines:
            if line.passes or line.kind in PASSING:
                passing[line.role] = passing.get(line.role, 0) + line.phases.get(phase, 0)
        staying = sum(x.phases.get(phase, 0) for x in self.lines if not (x.passes or x.kind in PASSING))
        return staying + max(passing.values(), default=0)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 or less where it fits, or where the available memory is unknown."""
        return self.peak - self.available if self.available is not None else 0


def make_plan(title: str, roles: Iterable[Role], device: torch.device, available: int | None, world: int = 1,
              *, is_exact: bool = True, calibration: Calibration | None = None) -> Plan:
    """Count all memory of `roles`; reads configurations only. Raises UserError where one cannot be read.

    is_exact False: see trace.activations. calibration: of the card (None: the published one).
    """
    roles = list(roles)
    phases = (*phases_of(roles), *([EXPORT] if any(r.trains for r in roles) else []))
    lines, host, notes = [], 0, (INTERPRETER,) if device.type == "cpu" else ()
    for role in roles:
        needs = _Needs(role, device, world, is_exact)
        for kind, sizes in needs.by_phase(phases).items():
            if any(sizes.values()):
                lines.append(Line(role.name, kind, sizes, passes=needs.waits))
        host += needs.host
        notes += (IMAGES,) * (needs.has_towers and IMAGES not in notes)
    lines += _of_process(device, Plan(title, phases, tuple(lines), available), calibration or Calibration())
    return Plan(title, phases, tuple(lines), available, notes, host, tuple(roles))


def _of_process(device: torch.device, tensors: Plan, calibration: Calibration) -> list[Line]:
    """Memory of the process beside the tensors of all roles."""
    if device.type != "cuda":
        return [Line("process", "libraries", dict.fromkeys(tensors.phases, LIBRARIES.get(device.type, 0)))]
    lost = {phase: round(calibration.fragmentation * tensors.total(phase)) for phase in tensors.phases}
    return [Line("process", "libraries", dict.fromkeys(tensors.phases, calibration.libraries_bytes)),
            Line("process", "fragmentation", lost)]


def phases_of(roles: list[Role]) -> tuple[str, ...]:
    """Phases of one step, in order."""
    sampled = {r.generation.phase for r in roles if r.generation}
    first = [*([GENERATE] if GENERATE in sampled else []), "score"]
    first = first if any(r.scores for r in roles) or "score" in sampled else first[:-1]
    return (*first, *(f"{verb} {r.name}" for r in roles if r.trains for verb in ("train", "step")))


class _Needs:
    """Memory of one role, per process. always: kind -> bytes in every phase; now: kind -> phase -> bytes; host: bytes
    that offloading moves to the CPU's memory, which on a CPU is the same and moves nothing."""

    def __init__(self, role: Role, device: torch.device, world: int, is_exact: bool) -> None:
        self.role, self.device, self.world = role, device, world
        self.always = dict.fromkeys(("weights", "adapters", "optimizer"), 0)
        self.now: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        self.host, self.is_host = 0, device.type == "cpu"
        self.waits, self.has_towers = role.waits and not self.is_host, False
        if role.labels:
            self._add_classifier()
            return
        self.sizes = trace.sizes(role.model, device, is_scalar=role.is_scalar)
        self.is_exact, self.has_towers = is_exact, self.sizes.has_towers
        self.always["adapters"] = self.sizes.adapter_bytes
        is_small = 10 * self.sizes.trained * self.sizes.itemsize < self.sizes.weight_bytes  # as in engine/train/zero.py
        self.stage = stage_of(self.sizes.trained_dtype, role.zero_stage, world, role.optim, role.offload,
                              is_small=is_small)
        self.act = self._activations(role.rows, role.length)
        self._add_weights()
        if role.trains:
            self._add_training()
        if role.scores:
            self._add_scoring()
        if role.keeps_head or role.top_k:
            self._add_targets()
        if role.generation:
            self._add_generation()
        if role.trains and not (role.is_scalar and self.waits):  # a critic is not exported
            self._add_export()
        if self.waits:
            self.host += sum(self.always.values())

    def by_phase(self, phases: tuple[str, ...]) -> dict[str, dict[str, int]]:
        """kind -> phase -> bytes. A role that waits elsewhere is on the device in its own phases only."""
        active = {phase for sizes in self.now.values() for phase in sizes}
        there = [p for p in phases if p in active or not self.waits]
        sizes = {kind: dict.fromkeys(there, self.always[kind]) if kind in self.always else self.now[kind]
                 for kind in KINDS}
        if self.role.keeps_head:  # the largest weight of a language model
            sizes["weights"] = dict.fromkeys(phases, min(self.always["weights"], self.sizes.largest)) | sizes["weights"]
        return sizes

    def _add_scoring(self) -> None:
        """The larger of its micro-batches: of samples and, for a teacher that reads them, of other texts."""
        role, forms = self.role, [(self.act.scoring, self.role.rows * self.role.predicted)]
        if role.texts and not role.trains:
            rows, length = role.texts
            forms.append((self._activations(rows, length).scoring, rows * (length - 1)))
        has_logits = not role.only_states
        sizes = [(act, trace.logit_bytes(role.model, self.device, predicted, trains=False)
                  if predicted and has_logits else 0) for act, predicted in forms]
        self.now["activations"]["score"], self.now["logits"]["score"] = max(sizes, key=sum)

    def _add_targets(self) -> None:
        """Hidden states of all that a step trains on, of samples or of as many other texts, in the CPU's memory until
        then; or per token the ids (8 bytes) and log-probabilities (4) of top_k tokens."""
        role, hidden = self.role, shapes.read_config(self.role.model).get_text_config().hidden_size
        longest = max(role.predicted, role.texts[1] - 1 if role.texts else 0)
        size = role.scored * longest * (role.top_k * (8 + 4) if role.top_k else hidden * self.sizes.itemsize)
        if self.is_host:
            self.now["targets"] = {"score": size, "train actor": size}
        else:
            self.host += size

    def _activations(self, rows: int, length: int) -> trace.Activations:
        role = self.role
        return trace.activations(role.model, self.device, rows, length, dropout=role.dropout, trains=role.trains,
                                 is_exact=self.is_exact, is_partitioned=self.stage == 3)

    def _offloaded(self, count: int) -> int:
        """Bytes on the device of `count` bytes that are offloaded to the CPU's memory."""
        if self.is_host:
            return count
        self.host += count
        return 0

    def _add_weights(self) -> None:
        """The full weights, or under ZeRO 3 a part; then gathered weights count too: nearly all of those that the next
        layers use, one layer of a base that roles share, and all weights for a rollout."""
        role, whole = self.role, self.sizes.weight_bytes
        is_away = "parameters" in role.offload and not self.is_host
        if self.stage < 3 or (self.world == 1 and not is_away):
            self.always["weights"] = 0 if role.base else whole
            return
        part = 0 if role.base else whole // self.world
        self.always["weights"] = self._offloaded(part) if is_away else part
        at_once = self.sizes.largest if role.is_shared else min(whole, MAX_LIVE * self.sizes.itemsize)
        tp = role.generation.tp if role.generation else 1
        sampled = whole if tp == 1 else whole // tp + self.sizes.largest  # shards, and the embeddings whole
        phases = {**({"score": at_once} if role.scores else {}),
                  **({f"train {role.name}": at_once} if role.trains else {}),
                  **({"generate": sampled} if role.generation else {})}
        self.now["gathered"] = phases

    def _add_classifier(self) -> None:
        """A model that scores text: its weights, and a batch's activations at the length in our tokens."""
        role = self.role
        self.always["weights"], self.now["activations"]["score"] = trace.classifier_bytes(
            role.model, self.device, role.labels, role.rows, role.length)

    def _add_training(self) -> None:
        """A micro-batch peaks at one of three moments: in the head, when all activations exist; in the backbone's
        backward, when the head's are gone; and at the end, when gradients are reduced and activations are gone."""
        role = self.role
        state = state_bytes(self.sizes.trained, self.sizes.trained_dtype, self.stage, self.world, role.optim,
                            role.offload, keeps_sums=self.is_host)
        train, step = f"train {role.name}", f"step {role.name}"
        forms = [(role.rows, role.length, role.predicted, role.entropy)]
        forms += [(*role.texts, role.texts[1] - 1, False)] if role.texts else []
        sizes = [self._micro_batch(*form) for form in forms]
        kept, logits, _ = max(sizes, key=lambda size: size[0] + size[1])
        self.host += max(size[2] for size in sizes)
        average = 4 * self.sizes.trained // (self.world if self.stage else 1) if role.has_average else 0
        away = average if "optimizer" in role.offload else 0
        self.always["optimizer"] = state.optimizer + average - away + self._offloaded(state.host + away)
        self.now["activations"][train], self.now["logits"][train] = kept, logits
        self.now["gradients"][train] = max(state.gradients, state.closing - kept - logits)
        self.now["gradients"][step] = state.stepping

    def _micro_batch(self, rows: int, length: int, predicted: int, entropy: bool) -> tuple[int, int, int]:
        """Bytes of one: activations, logits, and offloaded activations in the CPU's memory."""
        role, act, logits = self.role, self._activations(rows, length), 0
        if predicted:
            logits = trace.logit_bytes(role.model, self.device, rows * predicted, trains=True, entropy=entropy,
                                       teacher=role.teacher and role.teacher.model)
        if "activations" in role.offload and not self.is_host:
            return max(act.scoring, act.peak - act.saved), logits, act.saved
        return max(act.saved, act.peak - logits), logits, 0

    def _add_export(self) -> None:
        """Adapters are merged weight by weight in fp32 (the weight, B A scaled, and their sum); on a CPU a file of the
        result waits in memory until it is written. Fully trained weights are written as they are. For these ZeRO 3
        gathers one weight at a time, and for the forward that checks the export the embedding tables and one layer."""
        whole, is_cut = self.sizes.weight_bytes, bool(self.now["gathered"])
        waiting = min(saving.MAX_BYTES, whole) if self.is_host and (self.sizes.adapter_bytes or is_cut) else 0
        merged = 12 * self.sizes.widest + waiting if self.sizes.adapter_bytes else waiting
        checked = min(whole, 2 * self.sizes.largest + whole // self.sizes.num_layers) if is_cut else 0
        if needed := max(merged, checked):
            self.now["gathered"] |= {EXPORT: needed}

    def _add_generation(self) -> None:
        """The cache of all slots at full length; a prefill, which takes per token what scoring takes; one row of logits
        per slot, in the model's dtype and in fp32; and the mask of each slot's candidate tokens, a byte per token, on a
        card for all steps between two reads of the host (engine/decode/cuda_graphs.py)."""
        role, sampling = self.role, self.role.generation
        tokens = min(sampling.slots * sampling.prompt, max(MAX_PREFILL_TOKENS, sampling.prompt))
        per_token, per_sequence = trace.cache_bytes(role.model, self.device)
        whole = per_token * (sampling.prompt + sampling.response) + per_sequence
        num_rows = sampling.at_once(self.device, role.group, bool(per_sequence))
        slots = num_rows if sampling.is_short(self.device) else sampling.slots
        self.now["KV cache"][sampling.phase] = slots * whole // sampling.tp
        if sampling.keeps:
            rows = num_rows if self.is_host else STEPS_PER_LOOK * -(-num_rows // 16) * 16
            self.now["kept words"][sampling.phase] = rows * self.sizes.vocab
        sizes = {"activations": round(self.act.scoring * tokens / (role.rows * role.length)),
                 "logits": num_rows * self.sizes.vocab * (4 + self.sizes.itemsize)}
        for kind, size in sizes.items():
            self.now[kind][sampling.phase] = max(size, self.now[kind].get(sampling.phase, 0))


# -- what training needs beside the weights: optimizer state, masters, gradients and DeepSpeed's buffers ---------------


REDUCE_BUCKET = 50_000_000  # elements that DeepSpeed flattens at once
SUB_GROUP = 10**9  # elements that ZeRO 3 steps at once
# of one parameter; 8 bits: two bytes and two fp32 scales per block of 256 (bitsandbytes)
MOMENT_BYTES = {"adamw": 8.0, "adamw_unfused": 8.0, "adamw_8bit": 2 + 8 / 256, "sgd": 0.0}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one process beside the weights. optimizer: all the time; gradients: while micro-batches run; closing: at
    the end of the last backward, when gradients are reduced and activations are gone; stepping: during the optimizer's
    step, gradients included. host: what an offloaded optimizer keeps in the CPU's memory."""

    optimizer: int
    gradients: int
    closing: int
    stepping: int
    host: int = 0


def stage_of(dtype: torch.dtype, zero_stage: int | None, world: int, optim: str = "adamw",
             offload: Collection[str] = (), *, is_small: bool = False) -> int:
    """The ZeRO stage of training, as engine/train/zero_config.py chooses it."""
    if zero_stage is not None:
        return zero_stage
    return max([lowest_stage(dtype, world, optim, is_small=is_small), *(OFFLOADS[name] for name in offload)])


def state_bytes(count: int, dtype: torch.dtype, zero_stage: int | None, world: int = 1, optim: str = "adamw",
                offload: Collection[str] = (), *, keeps_sums: bool = True) -> StateBytes:
    """Of `count` parameters under DeepSpeed 0.19, as measured (tests/memory_plan/test_plan.py; one process, bytes
    per parameter; m is 8 for AdamW, 2 in 8 bits, 0 for SGD; g the bytes of a gradient, 4 or 2):

        dtype  ZeRO  optimizer             gradients  closing  step
        fp32   0     m                     g          g        g
        bf16   0     16 (and fp32 sums)    0          0        0
        any    1     4 + m (masters)       2 g        2 g      8
        any    2     4 + m                 g          3 g      8
        any    3     4 + m + 2 g           0          2 g      4 and, in 16 bits, 2

    Over `world` processes ZeRO 1 divides optimizer and step, ZeRO 2 and 3 the gradients too (ZeRO, 1910.02054, section
    5), and ZeRO 0 flattens a bucket at closing. A g of ZeRO 2 and 3 that is a bucket has at most 5e7 elements. bf16 at
    ZeRO 0 is ours (engine/train/adamw_master.py); with a single micro-batch it is 12, and 2 of gradients. keeps_sums:
    whether its fp32 sums stay after the step, as on a CPU; else 4 of the 16 exist in training only. An offloaded
    optimizer has its state, and gradients in fp32 and once or twice in g, in the CPU's memory, and steps there.
    """
    stage, size = stage_of(dtype, zero_stage, world, optim, offload), dtype.itemsize
    moments, bucket = MOMENT_BYTES[optim], min(count, REDUCE_BUCKET) * size
    gradient = size * count
    if stage == 0 and dtype != torch.float32:
        return StateBytes(16 * count, 0, 0, 0) if keeps_sums else StateBytes(12 * count, *[4 * count] * 3)
    if stage == 0:
        return StateBytes(round(moments * count), gradient, gradient + (bucket if world > 1 else 0), gradient)
    state = round((4 + moments) * count / world)
    gradients = {1: 2 * gradient, 2: gradient // world, 3: 0}[stage]
    closing = {1: gradients, 2: gradients + 2 * bucket, 3: 2 * bucket}[stage]
    buffers = gradient // world + bucket if stage == 3 else 0
    if "optimizer" in offload:
        host = state + (4 + size * (2 if stage == 2 else 1)) * count // world
        gradients = {1: 2 * gradient, 2: 0, 3: 0}[stage]
        closing = gradients + {1: 0, 2: bucket, 3: 2 * bucket}[stage]
        return StateBytes(bucket if stage == 3 else 0, gradients, closing, 0, host)
    stepping = (4 + (size if size == 2 else 0)) * min(count // world, SUB_GROUP) if stage == 3 else 8 * count // world
    return StateBytes(state + buffers, gradients, closing, stepping)
